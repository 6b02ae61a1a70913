"""The driver that test services start, and how tests wait for a job and read its log."""

from pathlib import Path

from service.jobs import Job, JobState
from service.store import Store
from tests.waiting import wait_until

DRIVER = Path(__file__).parents[1] / "launchers" / "driver.py"


def wait_for_state(store: Store, job: Job, *states: JobState) -> Job:
    wait_until(lambda: store.jobs.get(job.id).state in states, f"{job.id} becomes {states}")
    return store.jobs.get(job.id)


def moves(store: Store, job: Job) -> list[str]:
    """The states that the job went through, from its log, whose numbers must have no gap."""
    log = store.events.after(job.id, 0, limit=10_000)
    assert [event.number for event in log] == list(range(1, len(log) + 1))
    return [event.data["to"] for event in log if event.kind == "state"]


def worker_events(store: Store, job: Job) -> list[tuple[int | None, int | None]]:
    """(attempt, seq) of each worker event, in the log's order."""
    log = store.events.after(job.id, 0, limit=10_000)
    return [(event.attempt, event.seq) for event in log if event.seq is not None]


def starts(job_dir: Path) -> list[str]:
    """The attempts that a driver was started for, in order."""
    path = job_dir / "starts"
    return path.read_text().split() if path.exists() else []
