"""The ranks as the loop sees them: whole batches in, whole results out.

Every method here raises `WorkerLost` where a rank dies in it.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from algorithms.batch import Batch, Normalizer
from algorithms.protocols import Completion, Sampling, StepResult
from megatron_backend.generation.engine import check_prompts
from megatron_backend.training.shares import gather_rows, merge_step
from megatron_backend.workers.group import WorkerGroup
from service.spec.layout import Layout


class RayTrainEngine:
    """Implements `algorithms.protocols.TrainEngine` on a group."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def train_step(
        self, batch: Batch, normalizer: Normalizer, *, learning_rate: float
    ) -> StepResult:
        """One optimizer step over the whole batch."""
        shares = self._group.call("train_step", batch, normalizer, learning_rate=learning_rate)
        return merge_step(self._group.layout, shares)

    def log_probs(
        self, batch: Batch, *, model: Literal["policy", "reference"] = "policy"
    ) -> Tensor:
        """[B, T] log-probs of the batch's own tokens."""
        pieces = self._group.call("log_probs", batch, model=model)
        return gather_rows(self._group.layout, pieces)

    def evaluate_loss(self, batch: Batch, normalizer: Normalizer) -> StepResult:
        """The loss of the whole batch, without gradient."""
        return merge_step(self._group.layout, self._group.call("evaluate_loss", batch, normalizer))


class RayGenerator:
    """Implements `algorithms.protocols.Generator` on a group; makes the generation copies.

    Args:
        group: after its `setup`.
        tp: tensor parallelism of a copy; the ranks left over hold data-parallel copies.
        stop_token_ids: a completion ends with the first of these.
        max_length: longest sequence, prompt and answer together.
        vocab_size: number of real tokens.
    """

    def __init__(
        self,
        group: WorkerGroup,
        *,
        tp: int,
        stop_token_ids: Sequence[int],
        max_length: int,
        vocab_size: int,
    ) -> None:
        self._group = group
        self._layout = Layout(tp=tp, dp=group.layout.world_size // tp)
        self._max_length = max_length
        self._vocab_size = vocab_size
        group.call("setup_generation", self._layout, list(stop_token_ids), max_length)

    @property
    def max_length(self) -> int:
        """Longest sequence, prompt and answer together."""
        return self._max_length

    def sync_weights(self, version: int) -> None:
        """Moves the training weights to the generation copies, and names them `version`."""
        self._group.call("sync_weights", version)

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
            "generate",
            [calls[self._layout.coordinates(rank).dp] for rank in range(self._layout.world_size)],
        )
        return [completion for rank in self._layout.output_ranks for completion in results[rank]]
