"""Number formats at submit: what the hardware, the sampler or a layer cannot do is a 422."""

from typing import Any

import pytest

from service.spec.layout import Layout
from service.validation.precision import check_formats, check_fp8_layers
from tests.service.validation.jobs import EXPERTS, model, spec

GPUS = {"gpus_per_node": 8}
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 32, "num_key_value_heads": 16}


def fp8(dtype: str = "bf16", **settings: Any) -> dict[str, Any]:
    return {"dtype": dtype, "fp8": settings}


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "sampling",
    [
        {"online": True},
        {"evaluation": {"items": 4, "environment": {"id": "tools/calculator"}}},
    ],
    ids=["online", "evaluation"],
)
def test_the_generator_on_gpus_knows_bf16_only(dtype: str, sampling: dict[str, Any]) -> None:
    job = spec(precision={"dtype": dtype}, resources=GPUS, **sampling)
    (problem,) = check_formats(job, None)
    assert problem.field == "precision.dtype"
    assert f"{dtype} on GPUs cannot go with sampling" in problem.message
    assert problem.fix is not None
    assert problem.fix.startswith("use bf16")
    assert check_formats(spec(precision={"dtype": "bf16"}, resources=GPUS, **sampling), None) == []
    assert check_formats(spec(precision={"dtype": dtype}, **sampling), None) == []
    assert check_formats(spec(precision={"dtype": dtype}, resources=GPUS), None) == []


def test_fp8_needs_a_16_bit_dtype() -> None:
    (problem,) = check_formats(spec(precision=fp8("fp32")), None)
    assert problem.field == "precision.dtype"
    assert problem.fix == "use bf16 or fp16, or fp8: null"


def test_fp8_sees_no_padding_e11() -> None:
    (problem,) = check_formats(spec(precision=fp8(), training={"packing": False}), None)
    assert (problem.field, problem.fix) == ("training.packing", "use packing: true, or fp8: null")
    assert check_formats(spec(precision=fp8(), training={"packing": True}), None) == []


@pytest.mark.parametrize(
    ("recipe", "capability", "fix"),
    [
        ("delayed", (8, 0), "use fp8: null"),
        ("tensorwise", (8, 6), "use fp8: null"),
        ("blockwise", (8, 9), "use one of: delayed, tensorwise"),
        ("mxfp8", (9, 0), "use one of: delayed, tensorwise, blockwise"),
    ],
)
def test_a_recipe_that_the_cards_have_no_kernels_for(
    recipe: str, capability: tuple[int, int], fix: str
) -> None:
    job = spec(precision=fp8(recipe=recipe), resources=GPUS)
    (problem,) = check_formats(job, capability)
    assert (problem.field, problem.fix) == ("precision.fp8.recipe", fix)
    assert f"have {capability[0]}.{capability[1]}" in problem.message
    assert check_formats(job, None) == []
    assert check_formats(job, (10, 0)) == []
    assert check_formats(spec(precision=fp8(recipe=recipe)), capability) == []  # emulated


def test_weights_in_fp32_are_not_offloaded() -> None:
    offload = {"optimizer": {"offload": True}, "resources": GPUS}
    (problem,) = check_formats(spec(precision={"dtype": "fp32"}, **offload), None)
    assert (problem.field, problem.fix) == (
        "optimizer.offload",
        "set it to false, or use bf16 or fp16",
    )
    for dtype in ("bf16", "fp16"):
        assert check_formats(spec(precision={"dtype": dtype}, **offload), None) == []
    on_the_cpu = {"optimizer": {"offload": True}}
    assert check_formats(spec(precision={"dtype": "fp32"}, **on_the_cpu), None) == []


def test_delayed_scaling_leaves_no_layer_out() -> None:
    settings = {"recipe": "delayed", "first_last_bf16_layers": 1}
    (problem,) = check_formats(spec(precision=fp8(**settings)), None)
    assert problem.field == "precision.fp8.first_last_bf16_layers"
    assert problem.fix is not None
    assert "set it to 0" in problem.fix
    other = settings | {"recipe": "tensorwise"}
    assert check_formats(spec(precision=fp8(**other)), None) == []


def test_layers_at_the_ends_are_at_most_those_of_a_stage() -> None:
    job = spec(precision=fp8(first_last_bf16_layers=16))
    assert check_fp8_layers(job, model(), Layout()) == []
    (problem,) = check_fp8_layers(job, model(), Layout(pp=2))
    assert problem.field == "precision.fp8.first_last_bf16_layers"
    assert problem.fix == "use at most 15"


@pytest.mark.parametrize(
    ("recipe", "tp", "changes", "says"),
    [
        ("tensorwise", 8, {"num_key_value_heads": 1, "head_dim": 4}, "query heads x head_dim / tp"),
        ("tensorwise", 1, {"hidden_size": 520}, "hidden_size = 520"),
        ("delayed", 2, {"intermediate_size": 1040}, "intermediate_size / tp = 520"),
        ("mxfp8", 1, {"intermediate_size": 1040}, "multiples of 32"),
        ("blockwise", 8, {}, "query heads x head_dim / tp = 64"),
    ],
)
def test_matrices_that_a_recipe_cannot_take(
    recipe: str, tp: int, changes: dict[str, int], says: str
) -> None:
    job = spec(precision=fp8(recipe=recipe), resources=GPUS)
    (problem,) = check_fp8_layers(job, model(**WIDE | changes), Layout(tp=tp))
    assert problem.field == "precision.fp8.recipe"
    assert says in problem.message
    assert problem.fix is not None
    on_the_cpu = spec(precision=fp8(recipe=recipe))
    assert check_fp8_layers(on_the_cpu, model(**WIDE | changes), Layout(tp=tp)) == []


def test_matrices_that_a_recipe_can_take() -> None:
    for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8"):
        job = spec(precision=fp8(recipe=recipe), resources=GPUS)
        assert check_fp8_layers(job, model(**WIDE), Layout(tp=2)) == []
    experts = model(EXPERTS, **WIDE)
    (problem,) = check_fp8_layers(job, experts, Layout())
    assert "moe_intermediate_size / tp = 48" in problem.message


def test_mxfp8_has_no_kernels_for_the_cards_of_12_0() -> None:
    (problem,) = check_formats(spec(precision=fp8(recipe="mxfp8"), resources=GPUS), (12, 0))
    assert problem.field == "precision.fp8.recipe"
    assert problem.fix == "use one of: delayed, tensorwise, blockwise"
