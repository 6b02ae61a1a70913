"""Linear layers in 8 bits: the products by hand, the memory of delayed scaling, what stays out."""

from itertools import product
from pathlib import Path

import pytest
import torch

from megatron_backend.checkpoint import contents
from service.spec import Fp8Spec
from service.spec.layout import Layout
from tests.megatron_backend.fp8_runs import (
    evaluate_and_reload,
    layers_in_8_bits,
    load_and_save,
    save_and_go_on,
    save_own_memory,
    train_delayed,
    train_padded,
    train_recipes,
    train_with_loud_filler,
)
from tests.megatron_backend.ranks import Ranks

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def products(_rank: int, fp8: Fp8Spec) -> list[torch.Tensor]:
    """x, w, g and the three products of one layer."""
    from megatron_backend.fp8_emulation import LinearFp8, Rounding

    generator = torch.Generator().manual_seed(1)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((5, 7), (6, 7), (5, 6)))
    x.requires_grad_()
    w.requires_grad_()
    y = LinearFp8.apply(x, w, Rounding(fp8), None)
    y.backward(g)
    assert x.grad is not None
    assert w.grad is not None
    return [x.detach(), w.detach(), g, y.detach(), x.grad, w.grad]


@pytest.mark.parametrize(
    ("number_format", "gradients"),
    [("hybrid", torch.float8_e5m2), ("e4m3", torch.float8_e4m3fn)],
)
def test_three_products_of_rounded_operands(
    ranks: Ranks, number_format: str, gradients: torch.dtype
) -> None:
    spec = Fp8Spec.model_validate({"recipe": "tensorwise", "format": number_format})
    [[x, w, g, y, dx, dw]] = ranks.run(Layout(), products, spec)

    def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale = torch.finfo(dtype).max / values.abs().max()
        return (values * scale).to(dtype).double() / scale.double()

    x8, w8 = (rounded(values, torch.float8_e4m3fn) for values in (x, w))
    g8 = rounded(g, gradients)
    for result, expected in ((y, x8 @ w8.t()), (dx, g8 @ w8), (dw, g8.t() @ x8)):
        assert torch.allclose(result.double(), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(y, x @ w.t(), rtol=1e-3)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_each_recipe_trains_a_little_differently(ranks: Ranks, name: str) -> None:
    specs = [None, *(Fp8Spec.model_validate({"recipe": recipe}) for recipe in RECIPES)]
    [[plain, *recipes]] = ranks.run(Layout(), train_recipes, Layout(), specs, name)
    for recipe, losses in zip(RECIPES, recipes, strict=True):
        assert losses != plain, recipe
        assert losses == pytest.approx(plain, rel=0.03), recipe
    # Scales that are powers of two round alike, unless a block's range is more than the format's.
    assert len({tuple(losses) for losses in recipes[:3]}) == 3


def test_delayed_scaling_remembers_the_same_in_every_layout_and_recomputed(ranks: Ranks) -> None:
    [(losses, memory)] = ranks.run(Layout(), train_delayed, Layout(), "none")
    scales = {name: state[0] for name, state in memory.items()}
    assert all((scale != 1).all() for scale in scales.values())
    # The largest of what is remembered, at least, goes to the largest number of its format.
    limits = torch.tensor([448.0, 448.0, 57344.0])
    for state in memory.values():
        assert (state[0] * state[1:].amax(0) <= limits * (1 + 1e-6)).all()
    [(again, repeated)] = ranks.run(Layout(), train_delayed, Layout(), "full")
    assert again == losses
    assert all(torch.equal(state, repeated[name]) for name, state in memory.items())
    for two_losses, state in ranks.run(Layout(tp=2), train_delayed, Layout(tp=2), "none"):
        assert two_losses == pytest.approx(losses, rel=1e-3)
        for name, one in memory.items():
            assert torch.allclose(state[name], one, rtol=0.05), name


def test_e11_filler_reaches_neither_loss_nor_maxima(ranks: Ranks) -> None:
    [(loss, memory)] = ranks.run(Layout(), train_padded, False)
    [(padded_loss, padded)] = ranks.run(Layout(), train_padded, True)
    assert padded_loss == pytest.approx(loss, rel=1e-6)
    for name, state in memory.items():
        assert torch.allclose(padded[name], state, rtol=1e-5), name


@pytest.mark.parametrize(
    ("layout", "name", "recompute", "rows"),
    [
        (Layout(cp=2), "qwen3", "none", 2),
        (Layout(cp=2), "qwen2", "selective", 2),
        (Layout(cp=2, ep=2), "qwen3_moe", "full", 2),
        (Layout(dp=2), "qwen3", "none", 1),
        pytest.param(
            Layout(tp=2, cp=2, sequence_parallel=True),
            "qwen3_moe",
            "none",
            2,
            marks=pytest.mark.slow,
        ),
        pytest.param(Layout(pp=2, cp=2), "qwen3", "full", 2, marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_e11_filler_that_copies_nothing_reaches_no_maximum(
    ranks: Ranks, layout: Layout, name: str, recompute: str, rows: int
) -> None:
    """Inside rows, where context parallelism cuts them, and on a rank that has no row."""
    parts = ranks.run(layout, train_with_loud_filler, layout, name, recompute, rows)
    assert any(plain[2] for plain, _ in parts)
    for (losses, memory, _), (loud_losses, loud, _) in parts:
        assert loud_losses == losses
        for layer, state in memory.items():
            assert torch.equal(loud[layer], state), layer
    # One process sees the same, where it cuts the step into as many micro-batches.
    if name == "qwen3" and layout.pp == 1:
        [((losses, memory, _), _)] = ranks.run(
            Layout(), train_with_loud_filler, Layout(), name, recompute, rows
        )
        for (of_layout, found, _), _ in parts:
            assert of_layout == pytest.approx(losses, rel=1e-3)
            for layer, state in found.items():
                torch.testing.assert_close(state, memory[layer], rtol=0.05, atol=0)


def test_evaluations_leave_no_trace_and_checkpoints_bring_the_memory_back(ranks: Ranks) -> None:
    [(untouched, restored, names)] = ranks.run(Layout(), evaluate_and_reload)
    assert untouched
    assert restored
    assert "decoder.layers.0.self_attention.linear_qkv._extra_state" in names
    assert len(names) == 3 * 4


def test_a_resumed_job_remembers_the_maxima(ranks: Ranks, tmp_path: Path) -> None:
    [(losses, again, same)] = ranks.run(Layout(), save_and_go_on, tmp_path)
    assert again == losses
    assert same


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("qwen3", Layout(tp=2)),
        ("qwen3", Layout(pp=2)),
        ("qwen3_moe", Layout(dp=2, ep=2)),
    ],
    ids=str,
)
def test_a_checkpoint_of_one_layout_brings_the_memory_to_others(
    ranks: Ranks, tmp_path: Path, name: str, saved: Layout
) -> None:
    """Into one process and back, each layer's and each expert's own."""
    first, second, third = (tmp_path / part for part in ("first", "second", "third"))
    for folder, part in product((first, second, third), (contents.STATE, contents.RANDOM)):
        (folder / part).mkdir(parents=True)
    of_ranks = ranks.run(saved, save_own_memory, saved, name, first)
    expected = {layer: state for memory in of_ranks for layer, state in memory.items()}
    assert len({tuple(state.flatten().tolist()) for state in expected.values()}) == len(expected)
    [whole] = ranks.run(Layout(), load_and_save, Layout(), name, first, second)
    assert whole.keys() == expected.keys()
    again = ranks.run(saved, load_and_save, saved, name, second, third)
    for memory in (*of_ranks, whole, *again):
        for layer, state in memory.items():
            assert torch.equal(state, expected[layer]), layer
    assert [memory.keys() for memory in again] == [memory.keys() for memory in of_ranks]


def test_the_first_and_last_layers_and_the_router_stay_out(ranks: Ranks) -> None:
    [names] = ranks.run(Layout(), layers_in_8_bits, 1)
    assert {name.split(".")[1] for name in names} == {"1"}
    assert sum("linear_qkv" in name or "linear_proj" in name for name in names) == 2
    assert sum(".experts." in name for name in names) == 2 * 4
    assert len(names) == 10
