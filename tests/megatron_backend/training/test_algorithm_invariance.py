"""No algorithm's loss or gradient depends on how a batch is split, laid out, packed or ordered.

Every algorithm of the registry is tried, in every option that its spec names. All of a layout's
steps are taken in one start of its ranks; those of one process, whole and packed, are what the
others are compared with.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from algorithms.batch import Batch, LossOutput, Normalizer, Outputs
from algorithms.protocols import StepResult
from algorithms.sft import Sft
from megatron_backend.models.tensors import SINGLE_FILE
from megatron_backend.training.shares import merge_step
from service.spec import AlgorithmSpec, SftSpec
from service.spec.algorithm import algorithm_specs
from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.training.algorithm_runs import Step, take
from tests.megatron_backend.training.algorithm_variants import variants
from tests.megatron_backend.training.made_up_steps import (
    other_order,
    prepared,
    reordered,
    samples,
)

TOLERANCE = 1e-6
ALGORITHMS = sorted(algorithm_specs())


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to take the same steps.

    Attributes:
        layout: of the ranks.
        options: of `build_trainer`.
        moved: the rows stand in another order.
        all_options: whether every option of an algorithm is tried, or its weights only.
    """

    layout: Layout = field(default_factory=Layout)
    options: Mapping[str, Any] = field(default_factory=dict)
    moved: bool = False
    all_options: bool = False


SMALL = {"micro_batch_tokens": 40}
WHOLE = Way(all_options=True)
WAYS = {
    "order of rows": Way(moved=True, all_options=True),
    "padded micro-batches": Way(
        options={"packing": False, "micro_batch_size": 3}, all_options=True
    ),
    "padded": Way(options={"packing": False}),
    "packed micro-batches": Way(options=SMALL),
    "tp": Way(layout=Layout(tp=2), options=SMALL),
    "tp with sp": Way(layout=Layout(tp=2, sequence_parallel=True), options=SMALL),
    "pp": Way(layout=Layout(pp=2), options=SMALL),
    "dp": Way(layout=Layout(dp=2)),
    "cp": Way(layout=Layout(cp=2), options=SMALL),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What came of a step: its result, and its whole gradient by Hugging Face's names."""

    result: StepResult
    gradient: Mapping[str, Tensor]


type Take = Callable[[Way], dict[str, Taken]]


@cache
def steps_of(algorithm: str, *, moved: bool = False) -> dict[str, Step]:
    """Every loss of every variant of an algorithm."""
    found = {}
    for variant, spec in variants(algorithm_specs()[algorithm]).items():
        batch = prepared_batch(spec, moved=moved)
        for of_critic in (False, True) if spec.critic is not None else (False,):
            name = f"{algorithm}/{variant}{'/critic' if of_critic else ''}"
            found[name] = Step(name=name, spec=spec, of_critic=of_critic, batch=batch)
    return found


def prepared_batch(spec: AlgorithmSpec, *, moved: bool) -> Batch:
    drawn = samples(spec)
    if moved:
        drawn = reordered(drawn, other_order(spec, len(drawn.batch)))
    return prepared(spec, drawn)[1].batch


def steps_for(way: Way, algorithms: Sequence[str] = ALGORITHMS) -> list[Step]:
    """The steps that are taken in one way."""
    every = [step for name in algorithms for step in steps_of(name, moved=way.moved).values()]
    return [step for step in every if way.all_options or "=" not in step.name]


@pytest.fixture(scope="module")
def take_all(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Take:
    """Takes all steps of a way, once."""
    done: dict[int, dict[str, Taken]] = {}

    def run(way: Way) -> dict[str, Taken]:
        if id(way) not in done:
            folder = tmp_path_factory.mktemp("gradients")
            done[id(way)] = take_steps(ranks, way, steps_for(way), folder)
        return done[id(way)]

    return run


def take_steps(ranks: Ranks, way: Way, steps: Sequence[Step], folder: Path) -> dict[str, Taken]:
    answers = ranks.run(way.layout, take, way.layout, way.options, steps, folder)
    return {
        step.name: Taken(
            result=merge_step(way.layout, shares),
            gradient=load_file(folder / step.name / SINGLE_FILE),
        )
        for step, shares in zip(steps, zip(*answers, strict=True), strict=True)
    }


def differences(ours: Taken, theirs: Taken) -> list[str]:
    """What of a step is not the same to `TOLERANCE`: the loss, metrics, parts of the gradient.

    The gradient is held to it as one vector: each number, by the norm of the whole.
    """
    assert ours.gradient.keys() == theirs.gradient.keys()
    assert ours.result.metrics.keys() == theirs.result.metrics.keys()
    one, other = ours.result, theirs.result
    numbers = {
        "loss": (one.loss, other.loss),
        "norm": (one.gradient_norm, other.gradient_norm),
        **{name: (one.metrics[name], value) for name, value in other.metrics.items()},
    }
    found = [
        f"{name}: {a:.9g}, not {b:.9g}"
        for name, (a, b) in numbers.items()
        if not abs(a - b) <= TOLERANCE * (1 + abs(b))
    ]
    for name, right in theirs.gradient.items():
        largest = float((ours.gradient[name] - right).abs().max())
        if not largest <= TOLERANCE * (1 + other.gradient_norm):
            found.append(f"gradient of {name}: off by {largest:.3g} of {other.gradient_norm:.3g}")
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_loss_and_gradient_are_the_same_a01(take_all: Take, algorithm: str, way: str) -> None:
    expected, actual = take_all(WHOLE), take_all(WAYS[way])
    names = [step.name for step in steps_for(WAYS[way], [algorithm])]
    assert names
    for name in names:
        assert expected[name].result.loss != 0, name
        assert expected[name].result.gradient_norm > 1e-3, name
        assert not differences(actual[name], expected[name]), name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_a_row_is_worth_goes_where_the_row_goes(algorithm: str) -> None:
    """Advantages, and all else that is prepared before a batch is split."""
    for variant, spec in variants(algorithm_specs()[algorithm]).items():
        batch, moved = (prepared_batch(spec, moved=moved) for moved in (False, True))
        right = batch.rows(other_order(spec, len(batch)))
        assert torch.equal(moved.tokens, right.tokens)
        assert not torch.equal(moved.tokens, batch.tokens)
        trained = right.loss_mask > 0
        assert_same_tensors(variant, moved.per_token, right.per_token, trained)
        assert_same_tensors(variant, moved.per_sequence, right.per_sequence)
        assert_same_tensors(variant, moved.candidates, right.candidates)


def assert_same_tensors(
    variant: str,
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    where: Tensor | slice = slice(None),
) -> None:
    assert ours.keys() == theirs.keys()
    for name, right in theirs.items():
        torch.testing.assert_close(
            ours[name][where],
            right[where],
            rtol=TOLERANCE,
            atol=TOLERANCE,
            msg=f"{variant}: {name}",
        )


class DividesTooEarly(Sft):
    """The commonest fault: a mean over each micro-batch's own tokens."""

    def loss(self, outputs: Outputs, batch: Batch, _whole: Normalizer) -> LossOutput:
        return super().loss(outputs, batch, Normalizer.of(batch))


class DividesTooEarlySpec(SftSpec):
    """What `DividesTooEarly` is found by."""

    implementation: ClassVar[str] = f"{__name__}:DividesTooEarly"


def test_a_loss_that_is_divided_too_early_is_found_out(ranks: Ranks, tmp_path: Path) -> None:
    spec = DividesTooEarlySpec()
    steps = [Step(name="sft", spec=spec, batch=prepared_batch(spec, moved=False))]
    whole, split = (
        take_steps(ranks, way, steps, tmp_path / name)["sft"]
        for name, way in (("whole", WHOLE), ("split", WAYS["packed micro-batches"]))
    )
    wrong = differences(split, whole)
    assert any(text.startswith("loss") for text in wrong)
    assert any(text.startswith("gradient of model.layers.0") for text in wrong)
