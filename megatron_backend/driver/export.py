"""Hugging Face weights at the end of a job: written aside, compared, published by one rename."""

import math
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from algorithms.errors import JobFailure
from megatron_backend.checkpoint.durable import fsync_tree, move
from megatron_backend.checkpoint.fence import Fence
from megatron_backend.checkpoint.hf_files import copy_tokenizer
from megatron_backend.checkpoint.publish import step_name
from megatron_backend.driver.job import Job
from megatron_backend.driver.recorder import SpoolRecorder
from megatron_backend.workers.rank import RankWorker
from service.spec import Reason

if TYPE_CHECKING:  # at run time Ray must not be imported yet
    from megatron_backend.workers.group import WorkerGroup

PROBE_ROWS, PROBE_LENGTH = 4, 32
TOLERANCE = {"fp32": 1e-3, "bf16": 1.0}
"""Largest difference of a logit; rounding alone stays far below, a tensor in the wrong place does
not."""


def export(
    job: Job, fence: Fence, group: "WorkerGroup", recorder: SpoolRecorder, *, step: int
) -> Path:
    """Writes exports/step-XXXXXXXX and records the `export` event.

    Raises:
        JobFailure: transformers does not make the same logits of it; nothing was published.
        StaleAttempt: a newer attempt has taken over; nothing was published.
    """
    root = job.folder / "exports"
    root.mkdir(exist_ok=True)
    sweep(root, fence)
    staged = root / f".tmp-{step_name(step)}-{job.attempt}-{secrets.token_hex(4)}"
    group.call(RankWorker.export_hf, str(staged))
    copy_tokenizer(Path(job.context.model.tokenizer), staged)
    difference = _check(job, group, staged) if job.context.spec.checkpoint.verify_export else None
    fsync_tree(staged)
    target = root / step_name(step)
    with fence.held():
        if target.exists():  # an attempt that died before it could say so
            move(target, root / f".replaced-{target.name}-{secrets.token_hex(4)}")
        move(staged, target)
    recorder.record(
        "export", {"step": step, "path": str(target), "max_logit_diff": difference}, step=step
    )
    return target


def sweep(root: Path, fence: Fence) -> None:
    """Deletes what dead attempts left in `exports`.

    Raises:
        StaleAttempt: the newest attempt, not this one, is at work there; nothing was deleted.
    """
    with fence.held():
        for leftover in root.glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)  # a stale attempt may still write into it


def _check(job: Job, group: "WorkerGroup", folder: Path) -> float:
    """Compares the exported model with the ranks' on a few random tokens."""
    spec = job.context.spec
    tokens = torch.randint(
        int(job.context.model.config["vocab_size"]),
        (PROBE_ROWS, min(PROBE_LENGTH, spec.training.max_length)),
        generator=torch.Generator().manual_seed(spec.training.seed),
    )
    (ours,) = [
        torch.tensor(part) for part in group.call(RankWorker.logits, tokens) if part is not None
    ]
    difference = largest_difference(folder, tokens, ours)
    limit = TOLERANCE[spec.precision.dtype]
    if math.isnan(difference) or difference > limit:
        raise JobFailure(
            Reason.USER_ERROR,
            f"the exported weights do not give the trained model's logits: they differ by up to "
            f"{difference:.3g} (at most {limit} is rounding), so nothing was exported. The last "
            "checkpoint is intact. Set `checkpoint.verify_export` to false to export all the same",
        )
    return difference


def largest_difference(folder: Path, tokens: Tensor, logits: Tensor) -> float:
    """Of a logit, between an exported model under transformers and the given ones.

    Args:
        folder: the exported model.
        tokens: [B, T] int64.
        logits: [B, T, V] float32.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    with torch.no_grad():
        theirs = model.eval()(tokens).logits.float()
    return float((logits - theirs).abs().max())
