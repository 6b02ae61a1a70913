"""What an algorithm is, and how a spec finds its maths.

An algorithm is one short file: advantages and loss as pure functions on tensors, and a class that
ties them to its spec. The loop knows this Protocol only; no algorithm's name appears in it.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from algorithms.batch import Batch, LossOutput, Normalizer, PolicyOutputs
from service.spec import AlgorithmSpec


class Algorithm(Protocol):
    """The worker half of an algorithm. Built with its spec: `Grpo(spec)`.

    The driver builds one for `advantages`; each rank builds one for `loss`. It keeps no state.
    """

    needs_reference: bool
    """True where `reference_log_probs` must be in the batch."""
    needs_old_log_probs: bool
    """True where `old_log_probs`, by the training model before the first update, must be there."""
    updates_per_rollout: int
    """Optimizer steps on each batch of samples; 1 for offline algorithms."""

    def __init__(self, spec: Any) -> None: ...

    def advantages(self, rewards: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
        """One advantage a sample, for each group of samples of one question.

        A reward of None is unscorable: its advantage is None, and the loop trains nothing of it.
        Offline algorithms are never asked.
        """
        ...

    def loss(self, outputs: PolicyOutputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        """A micro-batch's share of the loss."""
        ...


def load_algorithm(spec: AlgorithmSpec) -> Algorithm:
    """The maths that belongs to a spec.

    Raises:
        ImportError: the module that `implementation` names is not there.
        AttributeError: the module has no such class.
    """
    module, _, name = spec.implementation.partition(":")
    algorithm: Algorithm = getattr(import_module(module), name)(spec)
    return algorithm
