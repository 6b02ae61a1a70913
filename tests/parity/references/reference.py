"""What a reference is: a function of somebody else's package, called on our batches.

These modules run in `.venv-parity`; see scripts/parity.sh.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.parity.batches import BATCHES, Array, Inputs

type Values = dict[str, Any]
"""Numbers and arrays by name; `loss` and `gradient` where there is a loss."""

NOTHING: Mapping[str, str] = {}
RATIO_BOUND = 20.0
"""Ours. Where a package has none, it is given log-ratios within it."""
MILD = tuple(name for name in BATCHES if name != "extreme")
"""Without the batch whose ratios and estimates reach the bounds that packages set to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One way to compute one case.

    Attributes:
        case: what is computed; the tests hold ours to it under this name.
        package: whose.
        function: where it stands there.
        settings: what it was called with.
        compute: the values on one batch.
        batches: names of the batches that it can compute.
        float32: True where the reference rounds to float32 on its way.
        differs: batch name to the row of docs/algorithms/differences.md ("Where a reference is
            converted") that says how its value becomes ours.
    """

    case: str
    package: str
    function: str
    settings: Mapping[str, Any]
    compute: Callable[[Inputs], Values]
    batches: tuple[str, ...]
    float32: bool
    differs: Mapping[str, str]


class References(list[Reference]):
    """Those of one package.

    Args:
        package: its name.
        module: where its functions stand; goes before each of their names.
    """

    def __init__(self, package: str, module: str = "") -> None:
        super().__init__()
        self._package, self._module = package, module

    def add(
        self,
        case: str,
        function: str,
        settings: Mapping[str, Any],
        compute: Callable[[Inputs], Values],
        *,
        batches: Iterable[str] = BATCHES,
        float32: bool = False,
        differs: Mapping[str, str] = NOTHING,
    ) -> None:
        """One more; see `Reference`."""
        given = tuple(batches)
        self.append(
            Reference(
                case=case,
                package=self._package,
                function=self._module + function,
                settings=settings,
                compute=compute,
                batches=given,
                float32=float32,
                differs={name: row for name, row in differs.items() if name in given},
            )
        )


def tensor(array: Array) -> Tensor:
    """A float64 copy."""
    return torch.tensor(np.asarray(array), dtype=torch.float64)


def leaf(array: Array) -> Tensor:
    """A float64 copy that takes a gradient."""
    return tensor(array).requires_grad_()


def loss_and_gradient(of: Array, loss: Callable[[Tensor], Tensor]) -> Values:
    """The loss, and its gradient with respect to `of`."""
    parameter = leaf(of)
    value = loss(parameter)
    value.sum().backward()
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return {"loss": float(value.detach().sum()), "gradient": gradient.numpy()}


def of_policy(
    loss: Callable[[Inputs, Tensor], Tensor], *, bound: float | None = None
) -> Callable[[Inputs], Values]:
    """A loss of the policy's log-probs [B, T], with its gradient.

    Args:
        loss: from a batch and its log-probs.
        bound: log-ratios to the old policy are cut to it before the reference sees them.
    """

    def compute(inputs: Inputs) -> Values:
        given = inputs if bound is None else inputs.bounded(bound)
        return loss_and_gradient(given.new, lambda log_probs: loss(given, log_probs))

    return compute
