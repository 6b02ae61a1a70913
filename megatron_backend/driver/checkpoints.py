"""Checkpoints of a running job: the ranks write, the driver publishes.

A save goes through three places: the ranks' files (written before `save` returns, or by processes
of their own afterwards), the publish, and, where the job has a `checkpoint.storage`, the copy
there. One save is on its way at a time: a second one waits for it. `poll` moves it on without
waiting, `drain` to its end.

What the storage refuses (OSError: a full disk, a quota, the network) is tried again
`checkpoint.save_retries` times, from the ranks' copies where they have one. If that does not help
the save is missed: a `warning` says so, `latest` stays where it was, and training goes on, until
more than `checkpoint.max_missed` saves in a row were missed or the job's last one was.
"""

import errno
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algorithms.errors import JobFailure
from megatron_backend.checkpoint import contents, hf_files
from megatron_backend.checkpoint.hashed_file import FileEntry
from megatron_backend.checkpoint.manifest import CorruptCheckpoint
from megatron_backend.checkpoint.publish import Published
from megatron_backend.checkpoint.remote import RemoteCheckpoints, Upload
from megatron_backend.checkpoint.retention import Retention, score_of
from megatron_backend.checkpoint.staging import Written
from megatron_backend.driver.job import Job
from megatron_backend.driver.recorder import SpoolRecorder
from megatron_backend.driver.start import Start, find_newest
from megatron_backend.workers.rank import RankWorker
from service.spec import Reason

if TYPE_CHECKING:  # at run time Ray must not be imported yet
    from megatron_backend.workers.group import WorkerGroup


@dataclass(slots=True, kw_only=True)
class _Save:
    """One save on its way.

    Attributes:
        staged: the folder that it is written into; None until there is one.
        begun: monotonic clock at the request.
        requested_at: seconds since the epoch, likewise.
        copied: the ranks hold a copy of their state, which can be written again.
        stall: how long training waited for it, in seconds.
        upload: the copy to the job's storage, once it is published.
    """

    step: int
    loop_state: str
    score: float | None
    required: bool
    begun: float
    requested_at: float
    staged: Path | None = None
    copied: bool = False
    failures: int = 0
    stall: float = 0.0
    upload: Upload | None = None


class JobCheckpoints:
    """Implements `algorithms.protocols.Checkpoints`.

    Args:
        job: this attempt, after `keep_model_files`.
        start: the job's checkpoints, and what it goes on from.
        group: the ranks, with their model.
        recorder: takes the `checkpoint` and `warning` events.
    """

    def __init__(
        self, job: Job, start: Start, group: "WorkerGroup[RankWorker]", recorder: SpoolRecorder
    ) -> None:
        self._job, self._group, self._recorder = job, group, recorder
        self._spec = job.context.spec.checkpoint
        self._store, self._remote, self._newest = start.store, start.remote, start.newest
        self._compared = start.newest  # with its hashes, and not loaded since
        self._save: _Save | None = None
        self._missed = 0
        if self._remote is not None and self._newest is not None:
            self._copy_again(self._remote, self._newest)

    @property
    def newest(self) -> Published | None:
        """What `load_latest` would restore."""
        return self._newest

    def save(
        self,
        step: int,
        loop_state: Mapping[str, Any],
        *,
        evaluations: Sequence[Mapping[str, Any]] = (),
        required: bool = False,
    ) -> None:
        """See `algorithms.protocols.Checkpoints.save`.

        Raises:
            StaleAttempt: a newer attempt has taken over; nothing was published.
            ValueError, TypeError: `loop_state` is no JSON.
            JobFailure: the storage refused too often.
        """
        begun, requested_at = time.monotonic(), time.time()
        self.drain()
        save = self._save = _Save(
            step=step,
            loop_state=json.dumps(dict(loop_state), allow_nan=False, sort_keys=True),
            score=score_of(evaluations, self._spec.keep_best),
            required=required,
            begun=begun,
            requested_at=requested_at,
        )
        self._write(save)
        save.stall = time.monotonic() - begun

    def poll(self) -> None:
        """Publishes a save whose files are all on disk."""
        if self._save is not None:
            self._move_on(self._save, wait=False)

    def drain(self) -> None:
        """Returns once no save is on its way any more."""
        while self._save is not None:
            self._move_on(self._save, wait=True)

    def load_latest(self) -> Mapping[str, Any] | None:
        """See `algorithms.protocols.Checkpoints.load_latest`.

        Raises:
            StaleAttempt: a newer attempt has taken over.
            JobFailure: there was a checkpoint, and none is whole any more.
            OSError: the storage cannot be read.
        """
        if self._save is not None and self._save.upload is None:
            self._discard(self._save)
            self._save = None
        if self._newest is None:
            return None
        newest = self._newest = self._whole(self._newest)
        same = newest.manifest.layout == self._job.layout
        self._group.call(RankWorker.load_state, str(newest.path), same)
        state: dict[str, Any] = json.loads((newest.path / contents.LOOP_STATE).read_text("utf-8"))
        return state

    def _whole(self, newest: Published) -> Published:
        """What is to be loaded: the newest, or, where that is damaged by now, what is before it."""
        compared, self._compared = self._compared, None
        if newest is compared:
            return newest
        found = find_newest(
            self._job,
            self._store,
            self._remote,
            lambda message: self._recorder.record("warning", {"message": message}),
        )
        if found is None:
            # The ranks' starting weights were not read, since a checkpoint was to be loaded.
            raise JobFailure(
                Reason.NODE_FAILURE,
                f"the checkpoint {newest.path.name} is damaged, and so is every one before it; the "
                "next attempt starts the job from its beginning",
            )
        return found

    def _write(self, save: _Save) -> None:
        """Has the ranks write their state, or copy it and write that meanwhile."""
        try:
            # The events of the steps in a checkpoint are never repeated, so none may be forgotten.
            self._recorder.sync()
            staged = self._stage(save)
        except OSError as error:
            self._failed(save, error)
            return
        written = self._group.call(RankWorker.begin_save, str(staged), self._spec.async_save)
        # In the background, a rank that has its answer already could not copy its part.
        save.copied = self._spec.async_save and None in written
        self._written(save, written)

    def _move_on(self, save: _Save, *, wait: bool) -> None:
        if save.upload is not None:
            self._uploaded(save, save.upload, wait=wait)
        else:
            self._written(save, self._group.call(RankWorker.save_result, wait))

    def _written(self, save: _Save, written: Sequence[Written | None]) -> None:
        ranks = [rank for rank in written if rank is not None]
        if len(ranks) < len(written):
            return
        errors = [rank.error for rank in ranks if rank.error is not None]
        files = {name: entry for rank in ranks for name, entry in rank.files.items()}
        try:
            if errors:
                raise errors[0]
            assert save.staged is not None
            self._publish(save, save.staged, files)
        except OSError as error:
            self._failed(save, error)
        except CorruptCheckpoint as error:  # the storage took the files, and has them no more
            self._failed(save, OSError(errno.EIO, str(error)))

    def _publish(self, save: _Save, staged: Path, files: Mapping[str, FileEntry]) -> None:
        (staged / contents.LOOP_STATE).write_text(save.loop_state, encoding="utf-8")
        model = self._job.context.model
        hf_files.copy_tokenizer(Path(model.tokenizer), staged / contents.HUGGING_FACE)
        hf_files.write_config(model.config, staged / contents.HUGGING_FACE)
        published = self._store.publish(
            staged,
            step=save.step,
            layout=self._job.layout,
            files=files,
            retention=Retention.of(self._spec),
            score=save.score,
        )
        self._newest = published
        self._recorder.record(
            "checkpoint",
            {
                "step": save.step,
                "path": str(published.path),
                "requested_at": save.requested_at,
                "seconds": time.monotonic() - save.begun,
                "stall_seconds": save.stall or time.monotonic() - save.begun,
                "bytes": published.manifest.bytes,
                "layout": self._job.layout.to_json(),
                "score": save.score,
            },
            step=save.step,
        )
        if self._remote is None:
            self._save, self._missed = None, 0
        else:
            save.failures = 0
            save.upload = self._remote.upload(published)

    def _copy_again(self, remote: RemoteCheckpoints, newest: Published) -> None:
        """Copies what an attempt before this one published, and may have died before copying."""
        if newest.path.parent != self._store.root:  # another job's
            return
        self._save = _Save(
            step=newest.manifest.step,
            loop_state="",
            score=newest.manifest.score,
            required=False,
            begun=time.monotonic(),
            requested_at=time.time(),
            upload=remote.upload(newest),
        )

    def _uploaded(self, save: _Save, upload: Upload, *, wait: bool) -> None:
        try:
            if upload.finished(wait=wait):
                self._save, self._missed = None, 0
        except OSError as error:
            self._failed(save, error)

    def _failed(self, save: _Save, error: OSError) -> None:
        """Tries again, or lets the save go, or gives the job up."""
        save.failures += 1
        if save.failures <= self._spec.save_retries:
            self._again(save)
            return
        self._discard(save)
        self._save = None
        self._missed += 1
        what = "copied to the storage" if save.upload is not None else "saved"
        message = f"the checkpoint of step {save.step} could not be {what}: {_words(error)}"
        if save.required or self._missed > self._spec.max_missed:
            raise JobFailure(
                Reason.NODE_FAILURE,
                f"{message}. " + self._why_it_ends(save) + " The last published checkpoint is "
                "intact; make room, or mend the storage, and start again",
            ) from error
        data = {"message": message, "missed": self._missed, "tries": save.failures}
        self._recorder.record("warning", data, step=save.step)

    def _again(self, save: _Save) -> None:
        if save.upload is not None:
            save.upload = save.upload.again()
            return
        self._discard(save)
        if not save.copied:
            self._write(save)
            return
        try:
            staged = self._stage(save)
        except OSError as error:
            self._failed(save, error)
        else:
            self._group.call(RankWorker.save_again, str(staged))

    def _why_it_ends(self, save: _Save) -> str:
        if save.required:
            return "It would have been the job's result."
        return (
            f"That is {self._missed} in a row, more than checkpoint.max_missed = "
            f"{self._spec.max_missed}."
        )

    def _stage(self, save: _Save) -> Path:
        save.staged = self._store.stage(save.step)
        for name in (contents.STATE, contents.RANDOM, contents.HUGGING_FACE):
            (save.staged / name).mkdir()
        return save.staged

    def _discard(self, save: _Save) -> None:
        if save.staged is not None:
            self._store.discard(save.staged)
            save.staged = None


def _words(error: OSError) -> str:
    return " ".join(str(part) for part in (error.strerror or str(error), error.filename) if part)
