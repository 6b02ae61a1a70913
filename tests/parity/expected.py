"""What the packages say of a case, and how it is compared with what we say."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.parity import golden_files
from tests.parity.batches import BATCHES, Array, Inputs

TOLERANCE = 1e-6
RATIO_BOUND = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One case on one batch by one package."""

    package: str
    case: str
    inputs: Inputs
    settings: Mapping[str, Any]
    values: Mapping[str, Any]
    differs: str | None

    def array(self, name: str) -> Array:
        """One of its values."""
        return np.asarray(self.values[name], dtype=np.float64)

    def loss_and_gradient(self, gradient: str = "gradient") -> tuple[Array, Array]:
        """Both as ours have to be: converted where the package means something else.

        The names stand in docs/algorithms/differences.md.
        """
        loss, gradients = self.array("loss"), self.array(gradient)
        if self.differs == "masked-rows":
            # A mean over all rows there, and here over those of which something is trained.
            scale = len(self.inputs.mask) / self.inputs.trained_rows.sum()
            return loss * scale, gradients * scale
        if self.differs == "ratio-bound":
            # It was given log-ratios within the bound; beyond it ours are constant.
            beyond = np.abs(self.inputs.new - self.inputs.old) > RATIO_BOUND
            return loss, np.where(beyond, 0.0, gradients)
        assert self.differs in (None, "likelihood-mean"), self.differs
        return loss, gradients


@functools.cache
def _read(package: str) -> golden_files.Golden:
    return golden_files.read(package)


def expected(case: str) -> list[Expected]:
    """Every package's values of a case, on every batch."""
    found = []
    for package in golden_files.packages():
        entry = _read(package)["cases"].get(case)
        for name, values in (entry["batches"] if entry else {}).items():
            found.append(
                Expected(
                    package=package,
                    case=case,
                    inputs=BATCHES[name],
                    settings=entry["of"]["settings"],
                    values=values,
                    differs=entry["of"]["differs"].get(name),
                )
            )
    assert found, f"no package has the case {case}"
    return found


def parameters(
    specs: Mapping[str, Iterable[Any]], *, batches: Iterable[str] = BATCHES
) -> list[Any]:
    """(spec, expected) for pytest: each case by each of our specs that means the same."""
    return [
        pytest.param(
            spec, one, id=f"{getattr(spec, 'type', '')} {case} {one.package} {one.inputs.name}"
        )
        for case, ours in specs.items()
        for spec in ours
        for one in expected(case)
        if one.inputs.name in batches
    ]


def agree(ours: Any, theirs: Any, *, tolerance: float = TOLERANCE) -> None:
    """Fails where a number is further off than that; above 1, than that part of the number."""
    one = ours.detach().double().numpy() if isinstance(ours, Tensor) else np.asarray(ours)
    other = np.asarray(theirs)
    assert one.shape == other.shape
    assert np.isfinite(one).all()
    apart = np.abs(one - other) / np.maximum(1.0, np.abs(other))
    assert apart.max() <= tolerance, f"{apart.max():.3g} apart:\n{one}\n{other}"
