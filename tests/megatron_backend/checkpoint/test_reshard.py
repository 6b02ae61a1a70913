"""A checkpoint of one layout is the same under every other, bit for bit (the kind of D07)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_backend.checkpoint import contents
from service.spec.layout import Layout
from tests.megatron_backend.checkpoint import reshard_ranks
from tests.megatron_backend.ranks import Ranks

LAYOUTS = [Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout()]


def staged(tmp_path: Path) -> Path:
    folder = tmp_path / "staged"
    for name in (contents.STATE, contents.RANDOM):
        (folder / name).mkdir(parents=True)
    return folder


def state(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{kind}.{name}": tensor
        for kind in ("weights", "exp_avg", "exp_avg_sq")
        for name, tensor in load_file(folder / kind / "model.safetensors").items()
    }


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


# A vocabulary of 101 is padded to 104 for one rank and to 112 for two.
@pytest.mark.parametrize(
    ("saved", "name"),
    [(Layout(tp=2), "qwen2-tied"), (Layout(pp=2), "llama"), (Layout(dp=2), "qwen3")],
    ids=str,
)
def test_weights_and_moments_under_every_layout(
    ranks: Ranks, tmp_path: Path, saved: Layout, name: str
) -> None:
    checkpoint = staged(tmp_path)
    expected_losses = ranks.run(
        saved, reshard_ranks.save, saved, name, checkpoint, tmp_path / "saved"
    )[0]
    expected = state(tmp_path / "saved")
    assert all(tensor.abs().max() > 0 for tensor in expected.values())
    for layout in LAYOUTS:
        out = tmp_path / str(layout)
        losses = ranks.run(layout, reshard_ranks.load, layout, name, checkpoint, out)[0]
        assert_equal(state(out), expected)
        assert losses == pytest.approx(expected_losses, rel=1e-6)


def test_a_job_that_goes_on_has_an_optimizer_of_its_own_settings(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Of the checkpoint's it has step count and moments."""
    saved, layout, checkpoint = Layout(), Layout(tp=2), staged(tmp_path)
    ranks.run(saved, reshard_ranks.save, saved, "qwen2-tied", checkpoint, tmp_path / "saved")
    settings = {"learning_rate": 1e-4, "betas": [0.8, 0.7], "epsilon": 1e-6, "weight_decay": 0.25}
    groups = ranks.run(
        layout,
        reshard_ranks.load_with_other_settings,
        *(layout, "qwen2-tied", checkpoint, tmp_path / "loaded", settings),
    )[0]
    assert_equal(state(tmp_path / "loaded"), state(tmp_path / "saved"))
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.25]
    for group in groups:
        assert (group["step"], group["max_lr"]) == (4, 1e-4)
        assert (tuple(group["betas"]), group["eps"]) == ((0.8, 0.7), 1e-6)


FOUR_LAYERS = {"num_hidden_layers": 4}


# TP4 has fewer KV heads than ranks. Experts with tensor parallelism need sequence parallelism.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [
        (
            "llama",
            Layout(tp=2, pp=2),
            [
                Layout(),
                Layout(tp=4),
                Layout(pp=4),
                Layout(tp=2, dp=2, sequence_parallel=True),
                Layout(pp=2, vpp=2),
                Layout(cp=2),
            ],
        ),
        (
            "qwen3_moe",
            Layout(dp=2, ep=2),
            [Layout(), Layout(tp=2, sequence_parallel=True), Layout(pp=2, vpp=2)],
        ),
        ("llama", Layout(pp=2, vpp=2), [Layout(), Layout(tp=2), Layout(cp=2)]),
        (
            "qwen3_moe",
            Layout(tp=2, dp=2, ep=2, sequence_parallel=True),
            [Layout(), Layout(dp=2, ep=2)],
        ),
        # With EP2 each expert has two copies on four data-parallel ranks.
        ("qwen3_moe", Layout(), [Layout(dp=2, ep=2), Layout(dp=4, ep=2)]),
    ],
    ids=["dense", "experts", "virtual-stages", "experts-tensor", "experts-whole"],
)
def test_d07_a_checkpoint_of_one_layout_is_the_same_under_others(
    ranks: Ranks, tmp_path: Path, name: str, saved: Layout, loaded: list[Layout]
) -> None:
    direct, first, second = (staged(tmp_path / n) for n in ("direct", "first", "second"))
    copied = tmp_path / "copied"
    copied.mkdir()
    for link, target in (("first", first), ("second", second)):
        (copied / link).symlink_to(target)
    expected_losses = ranks.run(
        saved, reshard_ranks.save_twice, saved, name, FOUR_LAYERS, direct, copied
    )[0]
    (expected,) = ranks.run(Layout(), reshard_ranks.whole_tensors, direct)
    (background,) = ranks.run(Layout(), reshard_ranks.whole_tensors, second)
    (before,) = ranks.run(Layout(), reshard_ranks.whole_tensors, first)
    assert_equal(background, expected)  # what was copied, not what was trained on meanwhile
    assert any(not torch.equal(before[name], tensor) for name, tensor in expected.items())
    moments = [tensor for name, tensor in expected.items() if "exp_avg" in name]
    assert len(moments) > 10
    assert all(tensor.abs().max() > 0 for tensor in moments)
    for layout in loaded:
        again = staged(tmp_path / str(layout))
        losses = ranks.run(
            layout, reshard_ranks.load_and_save, layout, name, FOUR_LAYERS, second, again
        )[0]
        (found,) = ranks.run(Layout(), reshard_ranks.whole_tensors, again)
        assert_equal(unpadded(found), unpadded(expected))
        assert losses == pytest.approx(expected_losses, rel=1e-6), layout


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_moe", Layout(dp=2, ep=2)),
        ("qwen3_moe", Layout(tp=2, sequence_parallel=True)),
        ("qwen2-tied", Layout(pp=2, vpp=2)),
        ("llama", Layout(cp=2)),
    ],
    ids=str,
)
def test_d03_the_same_layout_goes_on_bit_for_bit(
    ranks: Ranks, tmp_path: Path, name: str, layout: Layout
) -> None:
    """Losses, and all weights in the end; whole jobs, TP2, PP2 and DP2 are shown elsewhere."""
    checkpoint = staged(tmp_path)
    results = ranks.run(layout, reshard_ranks.go_on, layout, name, FOUR_LAYERS, checkpoint)
    for expected, losses, different in results:
        assert losses == expected
        assert len(set(losses)) == 3
        assert different == []


def unpadded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the rows that fill the vocabulary up, of which each layout has its own number."""
    vocabulary = ("embedding.word_embeddings", "output_layer")
    return {
        name: tensor[:101] if any(part in name for part in vocabulary) else tensor
        for name, tensor in tensors.items()
    }


def test_bfloat16_goes_on_from_its_fp32_weights(ranks: Ranks, tmp_path: Path) -> None:
    """From the rounded weights alone, the losses would not be equal to the last bit."""
    checkpoint, layout = staged(tmp_path), Layout(dp=2)
    expected = ranks.run(layout, reshard_ranks.save_bf16, layout, checkpoint)[0]
    assert ranks.run(layout, reshard_ranks.load_bf16, layout, checkpoint)[0] == expected
    split = ranks.run(Layout(tp=2), reshard_ranks.load_bf16, Layout(tp=2), checkpoint)[0]
    assert split == pytest.approx(expected, rel=1e-2)


# Experts that are spread over ranks have an optimizer of their own, and its scale.
@pytest.mark.parametrize(
    ("name", "saved", "other"),
    [
        ("qwen2-tied", Layout(), Layout(tp=2)),
        ("qwen3_moe", Layout(dp=2, ep=2), Layout()),
        ("qwen3_moe", Layout(), Layout(dp=2, ep=2)),
    ],
    ids=str,
)
def test_float16_goes_on_from_its_loss_scale(
    ranks: Ranks, tmp_path: Path, name: str, saved: Layout, other: Layout
) -> None:
    checkpoint = staged(tmp_path)
    ranks.run(saved, reshard_ranks.save_loss_scale, saved, name, checkpoint)
    for layout in (saved, other):
        for found in ranks.run(layout, reshard_ranks.load_loss_scale, layout, name, checkpoint):
            assert set(found) == {(2.0**9, 7)}, layout


def test_only_the_weights(ranks: Ranks, tmp_path: Path) -> None:
    checkpoint = staged(tmp_path)
    saved = Layout(dp=2)
    expected = ranks.run(
        saved, reshard_ranks.save, saved, "qwen2-tied", checkpoint, tmp_path / "saved"
    )[0]
    out = tmp_path / "loaded"
    losses = ranks.run(
        Layout(tp=2), reshard_ranks.load_weights_only, Layout(tp=2), "qwen2-tied", checkpoint, out
    )
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    assert_equal(
        load_file(out / "model.safetensors"),
        load_file(tmp_path / "saved" / "weights" / "model.safetensors"),
    )


# Of two data-parallel ranks the second has nothing to write but its generators.
@pytest.mark.parametrize(
    ("layout", "call"),
    [
        (Layout(dp=2), "ftruncate"),
        (Layout(tp=2), "ftruncate"),
        (Layout(tp=2), "memfd_create"),
        (Layout(tp=2), "mmap"),
    ],
    ids=str,
)
def test_where_one_rank_has_no_memory_for_its_copy_none_writes(
    ranks: Ranks, tmp_path: Path, layout: Layout, call: str
) -> None:
    (of_other, refused), written = zip(
        *ranks.run(
            layout,
            reshard_ranks.save_with_no_memory_on_rank_1,
            *(layout, staged(tmp_path), call),
        ),
        strict=True,
    )
    assert "another rank" in str(of_other.error)
    assert f"no memory from {call}" in str(refused.error)
    for each in written:
        assert each.error is None
        assert each.files


def test_a_checkpoint_that_is_gone(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="holds no checkpoint: was it deleted"):
        ranks.run(
            Layout(),
            reshard_ranks.load_weights_only,
            Layout(),
            "qwen2",
            tmp_path / "step-00000010",
            tmp_path / "out",
        )


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2), Layout(tp=2, sequence_parallel=True), Layout(pp=2), Layout(cp=2)],
    ids=str,
)
def test_d14_each_rank_goes_on_with_its_own_random_numbers(
    ranks: Ranks, tmp_path: Path, layout: Layout
) -> None:
    results = ranks.run(layout, reshard_ranks.draws, layout, staged(tmp_path))
    for after, again in results:
        assert after == again
    assert results[0][0][:2] != results[1][0][:2]  # the streams of the two ranks differ
