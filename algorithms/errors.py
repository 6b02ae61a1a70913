"""How the loop says that a job cannot go on."""

from service.spec import Reason


class JobFailure(Exception):
    """The job ends here. `reason` is for programs, the message for people.

    The message says what was wrong, where, and what to do about it.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
