"""The ranks as the loop sees them: whole batches in, whole results out."""

from typing import Literal

from torch import Tensor

from algorithms.batch import Batch, Normalizer
from algorithms.protocols import StepResult
from megatron_backend.training.shares import merge_step
from megatron_backend.workers.group import WorkerGroup
from megatron_backend.workers.rank import gather_rows


class RayTrainEngine:
    """Implements `algorithms.protocols.TrainEngine` on a group."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def train_step(
        self, batch: Batch, normalizer: Normalizer, *, learning_rate: float
    ) -> StepResult:
        """One optimizer step over the whole batch.

        Raises:
            WorkerLost: a rank died; so for every method here.
        """
        shares = self._group.call("train_step", batch, normalizer, learning_rate=learning_rate)
        return merge_step(self._group.layout, shares)

    def log_probs(
        self, batch: Batch, *, model: Literal["policy", "reference"] = "policy"
    ) -> Tensor:
        """[B, T] log-probs of the batch's own tokens."""
        return gather_rows(self._group.layout, self._group.call("log_probs", batch, model=model))

    def evaluate_loss(self, batch: Batch, normalizer: Normalizer) -> StepResult:
        """The loss of the whole batch, without gradient."""
        return merge_step(self._group.layout, self._group.call("evaluate_loss", batch, normalizer))
