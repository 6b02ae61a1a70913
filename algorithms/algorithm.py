"""What an algorithm is, and how a spec finds its maths.

An algorithm is one short file: advantages and loss as pure functions on tensors, and a class that
ties them to its spec. The loop knows this class only; no algorithm's name appears in it.

Two of them are made of one spec. The driver's turns what was sampled into what is trained
(`prepare`, `advantages`), and may keep a state, which checkpoints hold. Each rank's computes `loss`
on its micro-batches and keeps nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import Tensor

from algorithms.batch import Batch, LossOutput, Normalizer, Outputs
from algorithms.protocols import Workers
from algorithms.samples import Rollout
from service.spec import AlgorithmSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What each token of a rollout is worth.

    Attributes:
        advantages: [B, T]; what is not trained may hold anything finite.
        returns: [B, T], what a critic is to learn; None where there is none.
        metrics: numbers by name for the step's `metrics` event.
    """

    advantages: Tensor
    returns: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Algorithm(ABC):
    """The maths of an algorithm, on the driver and on ranks. Built with its spec: `Grpo(spec)`."""

    needs_old_log_probs: bool = False
    """True where `old_log_probs`, by the training model before the first update, must be there."""
    updates_per_rollout: int = 1
    """Passes over each batch of samples; 1 for offline algorithms."""
    mini_batches: int = 1
    """Optimizer steps of one pass."""

    @abstractmethod
    def __init__(self, spec: Any) -> None: ...

    def prepare(self, batch: Batch, workers: Workers) -> Batch:  # noqa: ARG002
        """On the driver, before a batch is split: what the loss needs that only the whole batch or
        another model can tell, by the models as they are now. The batch has `reference_log_probs`
        where the spec keeps a reference."""
        return batch

    def advantages(self, rollout: Rollout) -> Credit:  # noqa: ARG002
        """On the driver: what each token of a rollout is worth. Asked of online
        algorithms that learn from rewards.

        `rollout.batch` has `rollout_log_probs`, and `old_log_probs`, `reference_log_probs` and
        `values` where the algorithm needs them. Rows that are not scored are masked already.
        """
        raise TypeError(f"{type(self).__name__} has no advantages: it does not learn from rewards")

    @abstractmethod
    def loss(self, outputs: Outputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        """On a rank: a micro-batch's share of the loss."""

    def value_loss(
        self,
        outputs: Outputs,  # noqa: ARG002
        batch: Batch,  # noqa: ARG002
        normalizer: Normalizer,  # noqa: ARG002
    ) -> LossOutput:
        """On a rank: a micro-batch's share of the critic's loss; `batch` has `values` (the old
        ones) and `returns`. Asked where the spec has a critic."""
        raise TypeError(f"{type(self).__name__} trains no critic")

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of the driver's, as JSON values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned, or from the start where it is empty."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, and was given {list(state)}")


def load_algorithm(spec: AlgorithmSpec) -> Algorithm:
    """The maths that belongs to a spec.

    Raises:
        ImportError: the module that `implementation` names is not there.
        AttributeError: the module has no such class.
    """
    module, _, name = spec.implementation.partition(":")
    algorithm: Algorithm = getattr(import_module(module), name)(spec)
    return algorithm
