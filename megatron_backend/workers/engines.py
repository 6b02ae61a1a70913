"""The ranks as the loop sees them: whole batches in, whole results out.

Every method here raises `RanksFailed` where a rank dies or hangs in it.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from algorithms.batch import Batch, Normalizer
from algorithms.protocols import Completion, Sampling, StepResult, Trial
from megatron_backend.generation.engine import check_prompts
from megatron_backend.training.shares import RowShare, gather_rows, merge_step
from megatron_backend.workers.frozen import ScorerRank, TeacherRank
from megatron_backend.workers.group import WorkerGroup
from megatron_backend.workers.rank import RankWorker
from megatron_backend.workers.stragglers import Stragglers
from service.spec.flops import peak_flops, update_flops
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig


class _RayModel:
    """A model that is trained on a group's ranks.

    Args:
        group: the ranks.
        warn: is told of ranks that are slower than the others.
    """

    _trains: Literal["policy", "critic"]
    """Which of the ranks' models it is."""
    _what = ""
    """What warnings begin with."""

    def __init__(self, group: WorkerGroup[RankWorker], *, warn: Callable[[str], None]) -> None:
        self._group, self._warn = group, warn
        self._stragglers = Stragglers()

    def train_step(
        self,
        batch: Batch,
        normalizer: Normalizer,
        *,
        learning_rate: float,
        norm_limit: float = math.inf,
        loss_limit: float = math.inf,
    ) -> StepResult:
        """One optimizer step over the whole batch."""
        began = time.monotonic()
        shares = self._group.call(
            RankWorker.train_step,
            batch,
            normalizer,
            learning_rate=learning_rate,
            norm_limit=norm_limit,
            loss_limit=loss_limit,
            model=self._trains,
        )
        for message in self._stragglers.see(self._group.own_seconds):
            self._warn(f"{self._what}{message}")
        speed = self._speed(batch, time.monotonic() - began)
        result = merge_step(self._group.layout, shares)
        return replace(result, metrics={**result.metrics, **speed})

    def trials(self, batch: Batch, normalizer: Normalizer) -> list[Trial]:
        """The step by each half of the copies alone, not taken; none where all are one."""
        layout, result = self._group.layout, []
        shared = math.lcm(layout.ep, layout.cp) // layout.cp
        blocks = layout.dp // shared
        middle = blocks // 2 * shared
        for copies in (range(middle), range(middle, layout.dp)) if middle else ():
            shares = self._group.call(
                RankWorker.train_step,
                batch,
                normalizer,
                learning_rate=0.0,
                norm_limit=-1.0,
                copies=copies,
                model=self._trains,
            )
            ranks = [
                f"{rank} ({self._group.addresses[rank]})"
                for rank in range(layout.world_size)
                if layout.coordinates(rank).dp in copies
            ]
            merged = merge_step(layout, shares)
            result.append(Trial(ranks=f"rank {', '.join(ranks)}", result=merged))
        return result

    def _speed(self, _batch: Batch, _seconds: float, /) -> dict[str, float]:
        """Metrics that say how fast a step was."""
        return {}


class RayTrainEngine(_RayModel):
    """Implements `algorithms.protocols.TrainEngine` on a group.

    Args:
        group: the ranks.
        model: what they train.
        predicts: it predicts tokens; else it scores rows.
        warn: is told of ranks that are slower than the others.
    """

    _trains = "policy"

    def __init__(
        self,
        group: WorkerGroup[RankWorker],
        model: ModelConfig,
        *,
        predicts: bool,
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(group, warn=warn)
        self._model, self._predicts = model, predicts

    def _speed(self, batch: Batch, seconds: float, /) -> dict[str, float]:
        """Of each rank, in operations a second; where its GPU's peak is known, the share of it."""
        predicted = int(batch.loss_mask.sum()) if self._predicts else 0
        work = update_flops(self._model, batch.lengths.tolist(), predicted)
        rate = work / seconds / self._group.layout.world_size
        peak = peak_flops(self._group.gpu or "")
        return {"flops_per_second": rate} | ({"mfu": rate / peak} if peak else {})

    def log_probs(
        self, batch: Batch, *, model: Literal["policy", "reference"] = "policy"
    ) -> Tensor:
        """[B, T] log-probs of the batch's own tokens."""
        pieces = self._group.call(RankWorker.log_probs, batch, model=model)
        return gather_rows(self._group.layout, pieces)

    def evaluate_loss(self, batch: Batch, normalizer: Normalizer) -> StepResult:
        """The loss of the whole batch, without gradient."""
        shares = self._group.call(RankWorker.evaluate_loss, batch, normalizer)
        return merge_step(self._group.layout, shares)

    def tied_difference(self) -> float | None:
        """Largest difference between the copies of a tied embedding."""
        differences = self._group.call(RankWorker.tied_difference)
        return max((found for found in differences if found is not None), default=None)


class RayCritic(_RayModel):
    """Implements `algorithms.protocols.Critic` on the ranks of the policy."""

    _trains = "critic"
    _what = "training the critic, "

    def values(self, batch: Batch) -> Tensor:
        """[B, T] values before the batch's own tokens."""
        pieces = self._group.call(RankWorker.values, batch)
        return gather_rows(self._group.layout, pieces)


class RayGenerator:
    """Implements `algorithms.protocols.Generator` on a group, after `open`.

    Args:
        group: the ranks.
        tp: tensor parallelism of a copy; the ranks left over hold data-parallel copies.
        stop_token_ids: a completion ends with the first of these.
        max_length: longest sequence, prompt and answer together.
        vocab_size: number of real tokens.
    """

    def __init__(
        self,
        group: WorkerGroup[RankWorker],
        *,
        tp: int,
        stop_token_ids: Sequence[int],
        max_length: int,
        vocab_size: int,
    ) -> None:
        self._group = group
        self._layout = Layout(tp=tp, dp=group.layout.world_size // tp)
        self._stop_token_ids = list(stop_token_ids)
        self._max_length = max_length
        self._vocab_size = vocab_size

    def open(self) -> None:
        """Makes the generation copies; to be called after each `setup` of the group."""
        self._group.call(
            RankWorker.setup_generation, self._layout, self._stop_token_ids, self._max_length
        )

    @property
    def max_length(self) -> int:
        """Longest sequence, prompt and answer together."""
        return self._max_length

    def sync_weights(self, version: int) -> None:
        """Moves the training weights to the generation copies, and names them `version`."""
        self._group.call(RankWorker.sync_weights, version)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """One completion a prompt, in order.

        Raises:
            ValueError: a prompt is empty, too long, or holds no token id; no rank was asked.
        """
        check_prompts(
            prompts,
            range(len(prompts)),
            max_length=self.max_length,
            vocabulary_size=self._vocab_size,
        )
        calls: list[tuple[list[object], dict[str, object]]] = []
        for copy in range(self._layout.dp):
            share = self._layout.share(len(prompts), copy)
            calls.append(([[prompts[place] for place in share], list(share), sampling], {}))
        results = self._group.call_each(
            RankWorker.generate,
            [calls[self._layout.coordinates(rank).dp] for rank in range(self._layout.world_size)],
        )
        spoken = [results[rank] for rank in self._layout.output_ranks]
        return [completion for completions in spoken for completion in completions or ()]


class RayTeacher:
    """Implements `algorithms.protocols.Teacher` on a group of its own."""

    def __init__(self, group: WorkerGroup[TeacherRank]) -> None:
        self._group = group

    def likeliest(self, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
        """For each trained token the likeliest tokens in its place, and their log-probs."""
        answers = self._group.call(TeacherRank.likeliest, _bare(batch), count)
        ids, log_probs = _whole_rows(self._group.layout, answers)
        return ids, log_probs


class RayScorer:
    """Implements `algorithms.protocols.Scorer` on a group of its own."""

    def __init__(self, group: WorkerGroup[ScorerRank]) -> None:
        self._group = group

    def scores(self, batch: Batch) -> Tensor:
        """[B] scores of whole rows."""
        answers = self._group.call(ScorerRank.scores, _bare(batch))
        (scores,) = _whole_rows(self._group.layout, answers)
        return scores


def _bare(batch: Batch) -> Batch:
    """What a model reads of a batch, without what losses read."""
    return Batch(tokens=batch.tokens, lengths=batch.lengths, loss_mask=batch.loss_mask)


def _whole_rows(layout: Layout, answers: Sequence[Sequence[RowShare] | None]) -> list[Tensor]:
    """Each of the tensors that all ranks gave their shares of."""
    count = len(answers[layout.output_ranks[0]] or ())
    return [
        gather_rows(layout, [None if shares is None else shares[place] for shares in answers])
        for place in range(count)
    ]
