"""Checkpoints of a running job: the ranks write, the driver publishes."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_backend.checkpoint import contents, hf_files
from megatron_backend.checkpoint.publish import CheckpointStore, Published
from megatron_backend.driver.job import Job
from megatron_backend.driver.recorder import SpoolRecorder

if TYPE_CHECKING:  # at run time Ray must not be imported yet
    from megatron_backend.workers.group import WorkerGroup


class JobCheckpoints:
    """Implements `algorithms.protocols.Checkpoints`.

    Args:
        job: this attempt, after `keep_model_files`.
        store: of the job, opened.
        newest: what the store found at the start; None where there was nothing.
        group: the ranks, with their model.
        recorder: takes the `checkpoint` events.
    """

    def __init__(
        self,
        job: Job,
        store: CheckpointStore,
        newest: Published | None,
        group: "WorkerGroup",
        recorder: SpoolRecorder,
    ) -> None:
        self._job, self._store, self._group, self._recorder = job, store, group, recorder
        self._newest = newest

    def poll(self) -> None:
        """Nothing is on its way after a save."""

    def drain(self) -> None:
        """Nothing is on its way after a save."""

    def save(
        self,
        step: int,
        loop_state: Mapping[str, Any],
        *,
        evaluations: Sequence[Mapping[str, Any]] = (),  # noqa: ARG002
        required: bool = False,  # noqa: ARG002
    ) -> None:
        """Writes weights, optimizer, generators and `loop_state`, verifies, publishes.

        Raises:
            StaleAttempt: a newer attempt has taken over; nothing was published.
            ValueError, TypeError: `loop_state` is no JSON.
            OSError: the storage failed; nothing was published.
        """
        begin = time.monotonic()
        state = json.dumps(dict(loop_state), allow_nan=False, sort_keys=True)
        # The events of the steps in a checkpoint are never repeated, so none may be forgotten.
        self._recorder.sync()
        staged = self._store.stage(step)
        try:
            self._write(staged, state)
            self._newest = self._store.publish(
                staged,
                step=step,
                layout=asdict(self._job.layout),
                keep_last=self._job.context.spec.checkpoint.keep_last,
            )
        finally:
            self._store.discard(staged)  # what was published has another name by now
        self._recorder.record(
            "checkpoint",
            {
                "step": step,
                "path": str(self._newest.path),
                "seconds": time.monotonic() - begin,
                "bytes": self._newest.manifest.bytes,
                "layout": asdict(self._job.layout),
            },
            step=step,
        )

    def load_latest(self) -> Mapping[str, Any] | None:
        """Restores the newest published checkpoint; its `loop_state`, None where there is none."""
        if self._newest is None:
            return None
        same = dict(self._newest.manifest.layout) == asdict(self._job.layout)
        self._group.call("load_state", str(self._newest.path), same)
        state: dict[str, Any] = json.loads(
            (self._newest.path / contents.LOOP_STATE).read_text("utf-8")
        )
        return state

    def _write(self, staged: Path, state: str) -> None:
        for name in (contents.STATE, contents.RANDOM, contents.HUGGING_FACE):
            (staged / name).mkdir()
        self._group.call("save_state", str(staged))
        (staged / contents.LOOP_STATE).write_text(state, encoding="utf-8")
        model = self._job.context.model
        hf_files.copy_tokenizer(Path(model.tokenizer), staged / contents.HUGGING_FACE)
        hf_files.write_config(model.config, staged / contents.HUGGING_FACE)
