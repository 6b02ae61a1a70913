"""What an attempt goes on from: its own newest checkpoint, a copy of it, or another job's."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from algorithms.errors import JobFailure
from megatron_backend.checkpoint.fence import Fence
from megatron_backend.checkpoint.manifest import (
    CorruptCheckpoint,
    RefusedCheckpoint,
    model_digest,
)
from megatron_backend.checkpoint.publish import CheckpointStore, Owner, Published
from megatron_backend.checkpoint.remote import RemoteCheckpoints, open_remote
from megatron_backend.checkpoint.retention import Retention
from megatron_backend.driver.job import Job
from service.spec import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The checkpoints of an attempt at its start.

    Attributes:
        store: the job's, opened.
        remote: the copies in its storage, where it has one.
        newest: what the attempt goes on from; None where the job begins.
    """

    store: CheckpointStore
    remote: RemoteCheckpoints | None
    newest: Published | None


def open_start(job: Job, fence: Fence, warn: Callable[[str], None]) -> Start:
    """Opens the job's checkpoints and finds what to go on from. Call before Ray is started.

    Args:
        job: this attempt.
        fence: taken.
        warn: is told of what was damaged.

    Raises:
        StaleAttempt: a newer attempt has taken over.
        JobFailure: what is there cannot be gone on from.
        OSError: the storage cannot be read.
    """
    spec, job_id = job.context.spec.checkpoint, job.context.job_id
    owner = Owner(job=job_id, model=model_digest(job.context.model.config))
    store = CheckpointStore(job.folder, fence, owner)
    store.open()
    remote = open_remote(
        spec.storage,
        job_id=job_id,
        job_dir=job.folder,
        attempt=job.attempt,
        retention=Retention.of(spec),
        deadline=job.context.spec.faults.deadlines.save,
    )
    try:
        newest = store.newest(warn)
        if newest is None and remote is not None:
            newest = remote.fetch_newest(store, warn)
        if newest is None:
            newest = _of_another_job(job, store)
    except RefusedCheckpoint as error:
        raise JobFailure(Reason.USER_ERROR, str(error)) from error
    return Start(store=store, remote=remote, newest=newest)


def _of_another_job(job: Job, store: CheckpointStore) -> Published | None:
    """The checkpoint that the service put aside for this job when it was submitted."""
    resumed = job.context.resume
    if resumed is None:
        return None
    folder = Path(resumed.checkpoint)
    try:
        return Published(path=folder, manifest=store.verify(folder, job=resumed.job))
    except CorruptCheckpoint as error:
        raise JobFailure(
            Reason.USER_ERROR,
            f"the checkpoint of {resumed.job} to go on from is damaged: {error}; submit the job "
            "again with another `resume.step`",
        ) from error
