"""What the store refuses. Nothing was changed where one of these is raised."""


class StoreError(Exception):
    """Any refusal of the store."""


class NotFound(StoreError):
    """There is no such row."""

    def __init__(self, kind: str, key: str) -> None:
        super().__init__(f"there is no {kind} {key!r}")
        self.kind = kind
        self.key = key


class IdempotencyConflict(StoreError):
    """The idempotency key was used before, with another body."""

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(
            f"the idempotency key {key!r} belongs to job {job_id}, which was submitted with "
            "another body; use a new key for a new job"
        )
        self.job_id = job_id


class ClaimLost(StoreError):
    """Another reconciler holds the job now; whatever was found out about it is void."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"the claim on job {job_id} was lost to another reconciler")
        self.job_id = job_id


class StaleAttempt(StoreError):
    """The attempt is over or another has taken its place; it may write nothing and must end."""

    def __init__(self, job_id: str, attempt: int, newest: int) -> None:
        super().__init__(
            f"attempt {attempt} of job {job_id} is over"
            + (f"; attempt {newest} has taken its place" if newest > attempt else "")
        )
        self.job_id = job_id
        self.attempt = attempt
        self.newest = newest


class WrongToken(StoreError):
    """The token is not this attempt's."""

    def __init__(self, job_id: str, attempt: int) -> None:
        super().__init__(f"the token is not that of attempt {attempt} of job {job_id}")
