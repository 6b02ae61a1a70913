"""Hugging Face weights at the end of a job: written aside, compared, published by one rename."""

import math
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from algorithms.batch import Batch
from algorithms.errors import JobFailure
from megatron_backend.checkpoint.durable import fsync_tree, move
from megatron_backend.checkpoint.fence import Fence
from megatron_backend.checkpoint.hf_files import copy_tokenizer
from megatron_backend.driver.job import Job
from megatron_backend.driver.recorder import SpoolRecorder
from megatron_backend.training.shares import gather_rows
from megatron_backend.workers.rank import RankWorker
from service.spec import Reason
from service.spec.attempt import step_name

if TYPE_CHECKING:  # at run time Ray must not be imported yet
    from megatron_backend.workers.group import WorkerGroup

PROBE_ROWS, PROBE_LENGTH = 4, 32
TOLERANCE = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 6e-2}
"""Of `Difference.relative`: two to three times what rounding does in models of 2 to 24 layers."""
SCORE_TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 6e-2}
"""The same of scores."""
SCORED_ROWS = 16
"""Rows of a probe of a reward model, which says one number of each."""
MAX_COMPARED_BYTES = 32 * 2**30
"""Of weights that the driver loads to compare logits or scores; of larger ones only the files are
compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Between two models' logits, or scores.

    Attributes:
        largest: of any of them.
        relative: of a token's logits, root mean square, in standard deviations of that token's
            logits; the median over tokens. In a mixture of experts rounding may send single tokens
            elsewhere; weights that are wrong change all of them. Of scores, root mean square over
            rows, in standard deviations over rows.
    """

    largest: float
    relative: float


def export(
    job: Job, fence: Fence, group: "WorkerGroup[RankWorker]", recorder: SpoolRecorder, *, step: int
) -> Path:
    """Writes exports/step-XXXXXXXX and records the `export` event.

    Raises:
        JobFailure: the files are not what the ranks hold, or transformers does not make the same
            logits of them; nothing was published.
        StaleAttempt: a newer attempt has taken over; nothing was published.
    """
    root = job.folder / "exports"
    root.mkdir(exist_ok=True)
    sweep(root, fence)
    staged = root / f".tmp-{step_name(step)}-{job.attempt}-{secrets.token_hex(4)}"
    target = root / step_name(step)
    try:
        difference = _write(job, group, staged)
        _publish(staged, target, fence)
    except BaseException:  # it is as large as the model, and a job that failed may be its last try
        shutil.rmtree(staged, ignore_errors=True)
        raise
    recorder.record(
        "export", {"step": step, "path": str(target), "max_logit_diff": difference}, step=step
    )
    return target


def _write(job: Job, group: "WorkerGroup[RankWorker]", staged: Path) -> float | None:
    """Writes and compares the files; the largest difference, where logits or scores were compared.

    Raises:
        JobFailure: see `export`.
    """
    group.call(RankWorker.export_hf, str(staged))
    copy_tokenizer(Path(job.context.model.tokenizer), staged)
    difference = None
    if job.context.spec.checkpoint.verify_export:
        _check_files(group, staged)
        if sum(file.stat().st_size for file in staged.glob("*.safetensors")) <= MAX_COMPARED_BYTES:
            scores = job.context.spec.algorithm.head == "value"
            difference = (_check_scores if scores else _check_logits)(job, group, staged)
    fsync_tree(staged)
    return difference


def _publish(staged: Path, target: Path, fence: Fence) -> None:
    """Gives the files their name, in place of an export that an attempt left before it died.

    Raises:
        StaleAttempt: a newer attempt has taken over; nothing was published.
    """
    with fence.held():
        if not target.exists():
            move(staged, target)
            return
        replaced = target.parent / f".replaced-{target.name}-{secrets.token_hex(4)}"
        move(target, replaced)
        move(staged, target)
        shutil.rmtree(replaced, ignore_errors=True)


def sweep(root: Path, fence: Fence) -> None:
    """Deletes what dead attempts left in `exports`.

    Raises:
        StaleAttempt: the newest attempt, not this one, is at work there; nothing was deleted.
    """
    with fence.held():
        for leftover in root.glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)  # a stale attempt may still write into it


def _check_files(group: "WorkerGroup[RankWorker]", folder: Path) -> None:
    """Lets each rank read its parameters back; no more of them is in memory than in an import."""
    wrong = [name for name in group.call(RankWorker.check_export, str(folder)) if name is not None]
    if wrong:
        raise JobFailure(
            Reason.INTERNAL_ERROR,
            f"the exported files do not hold what the ranks hold (the first is {wrong[0]}), so "
            "nothing was exported; the last checkpoint is intact. See whether the storage is sound",
        )


def _check_logits(job: Job, group: "WorkerGroup[RankWorker]", folder: Path) -> float:
    """Compares the exported model with the ranks' on a few random tokens; the largest difference
    of a logit."""
    tokens = _probe(job, PROBE_ROWS)
    (ours,) = [
        torch.tensor(part) for part in group.call(RankWorker.logits, tokens) if part is not None
    ]
    difference = compare(folder, tokens, ours)
    _refuse_large(difference, "logits", TOLERANCE[job.context.spec.precision.dtype])
    return difference.largest


def _check_scores(job: Job, group: "WorkerGroup[RankWorker]", folder: Path) -> float:
    """Compares the exported reward model with the ranks' on a few random tokens; the largest
    difference of a score."""
    tokens = _probe(job, SCORED_ROWS)
    batch = Batch(
        tokens=tokens,
        lengths=torch.full((len(tokens),), tokens.shape[1]),
        loss_mask=torch.zeros(tokens.shape),
    )
    ours = gather_rows(job.layout, group.call(RankWorker.scores, batch))
    difference = compare_scores(folder, tokens, ours)
    _refuse_large(difference, "scores", SCORE_TOLERANCE[job.context.spec.precision.dtype])
    return difference.largest


def _probe(job: Job, rows: int) -> Tensor:
    """[rows, T] random tokens, the same for the same job. None is the padding token, at which
    transformers would see the end of a row."""
    config, training = job.context.model.config, job.context.spec.training
    return probe_tokens(
        int(config["vocab_size"]),
        config.get("pad_token_id"),
        rows=rows,
        length=min(PROBE_LENGTH, training.max_length),
        seed=training.seed,
    )


def probe_tokens(
    vocab_size: int, padding: int | None, *, rows: int, length: int, seed: int
) -> Tensor:
    """[rows, length] int64 below `vocab_size`, none of them `padding`."""
    generator = torch.Generator().manual_seed(seed)
    if padding is None:
        return torch.randint(vocab_size, (rows, length), generator=generator)
    tokens = torch.randint(vocab_size - 1, (rows, length), generator=generator)
    return tokens + (tokens >= padding)


def _refuse_large(difference: Difference, what: str, limit: float) -> None:
    if math.isnan(difference.relative) or difference.relative > limit:
        raise JobFailure(
            Reason.USER_ERROR,
            f"the exported weights do not give the trained model's {what}: they differ by "
            f"{difference.relative:.2g} standard deviations (at most {limit} is rounding), and by "
            f"up to {difference.largest:.3g}, so nothing was exported. The last checkpoint is "
            "intact. Set `checkpoint.verify_export` to false to export all the same",
        )


def compare(folder: Path, tokens: Tensor, logits: Tensor) -> Difference:
    """Of logits, between an exported model under transformers and the given ones.

    Args:
        folder: the exported model.
        tokens: [B, T] int64.
        logits: [B, T, V] float32.
    """
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        theirs = _load(AutoModelForCausalLM, folder)(tokens).logits.float()
    difference = logits - theirs
    spread = logits.std(-1).clamp_min(torch.finfo(torch.float32).tiny)
    relative = difference.square().mean(-1).sqrt() / spread
    return Difference(largest=float(difference.abs().max()), relative=float(relative.median()))


def compare_scores(folder: Path, tokens: Tensor, scores: Tensor) -> Difference:
    """Of scores, between an exported reward model under transformers and the given ones.

    Where all scores are much the same, rounding is a large part of their deviation: it counts as a
    twentieth of their size at least.

    Args:
        folder: the exported model.
        tokens: [B, T] int64, without the padding token.
        scores: [B] float32.
    """
    from transformers import AutoModelForSequenceClassification

    model = _load(AutoModelForSequenceClassification, folder)
    with torch.no_grad():
        # One by one: a model without a padding token takes no more.
        theirs = torch.cat([model(row.unsqueeze(0)).logits.float()[0] for row in tokens])
    difference = scores - theirs
    size = scores.square().mean().sqrt()
    spread = torch.maximum(scores.std(), size / 20).clamp_min(torch.finfo(torch.float32).tiny)
    relative = difference.square().mean().sqrt() / spread
    return Difference(largest=float(difference.abs().max()), relative=float(relative))


def _load(kind: Any, folder: Path) -> Any:
    """A model of transformers, as it was saved."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    return kind.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
