"""What an attempt goes on from: its own newest checkpoint, a copy of it, or another job's.

Every checkpoint that is loaded is compared with its manifest's hashes here, by the driver, before
there are ranks; one that is gone on from is compared again before each later load.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from algorithms.errors import JobFailure
from megatron_backend.checkpoint.fence import Fence
from megatron_backend.checkpoint.manifest import (
    CorruptCheckpoint,
    RefusedCheckpoint,
    model_digest,
    verify,
)
from megatron_backend.checkpoint.publish import CheckpointStore, Owner, Published
from megatron_backend.checkpoint.remote import RemoteCheckpoints, open_remote
from megatron_backend.checkpoint.retention import Retention
from megatron_backend.driver.job import Job
from megatron_backend.driver.tokenizers import MODEL_NAMES
from service.spec import Reason, ResolvedModel


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
    """Opens the job's checkpoints, finds what to go on from, and verifies what other jobs' weights
    are needed beside it. Call before Ray is started.

    Args:
        job: this attempt.
        fence: taken.
        warn: is told of what was damaged.

    Raises:
        StaleAttempt: a newer attempt has taken over.
        JobFailure: what is there cannot be gone on from, or another job's weights are damaged.
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
    newest = find_newest(job, store, remote, warn)
    try:
        _verify_models(job, fresh=newest is None)
    except RefusedCheckpoint as error:
        raise JobFailure(Reason.USER_ERROR, str(error)) from error
    return Start(store=store, remote=remote, newest=newest)


def find_newest(
    job: Job,
    store: CheckpointStore,
    remote: RemoteCheckpoints | None,
    warn: Callable[[str], None],
) -> Published | None:
    """What to go on from, compared with its manifest's hashes; None where the job begins.

    Raises:
        StaleAttempt: a newer attempt has taken over.
        JobFailure: what is there cannot be gone on from.
        OSError: the storage cannot be read.
    """
    try:
        newest = store.newest(warn)
        if newest is None and remote is not None:
            newest = remote.fetch_newest(store, warn)
        return newest or _of_another_job(job, store)
    except RefusedCheckpoint as error:
        raise JobFailure(Reason.USER_ERROR, str(error)) from error


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


def _verify_models(job: Job, *, fresh: bool) -> None:
    """Compares the checkpoints of other jobs, from which models start, with their manifests.

    Raises:
        RefusedCheckpoint: another release wrote one.
        JobFailure: one is damaged, or gone.
    """
    verified: set[str] = set()
    for name, field, model in _loaded_models(job, fresh=fresh):
        if model.kind != "checkpoint" or str(model.weights) in verified:
            continue
        folder = Path(str(model.weights))
        try:
            verify(folder)
        except (CorruptCheckpoint, FileNotFoundError) as error:
            what = f"is damaged: {error}" if folder.is_dir() else "is gone: its job has deleted it"
            raise JobFailure(
                Reason.USER_ERROR,
                f"the checkpoint {folder}, which the {name} comes from, {what}. Submit the job "
                f"again with another checkpoint in `{field}.from`",
            ) from error
        verified.add(str(folder))


def _loaded_models(job: Job, *, fresh: bool) -> Iterator[tuple[str, str, ResolvedModel]]:
    """The models whose starting weights this attempt loads: name, field of the job, and place."""
    spec = job.context.spec
    if fresh or spec.algorithm.keeps_reference:
        yield "model", "model", job.context.model
    for role, (field, _) in spec.other_models.items():
        if fresh or role != "critic":  # a critic is in the job's own checkpoints
            yield MODEL_NAMES[role], field, job.context.other_models[role]
