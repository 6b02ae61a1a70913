"""Checkpoints with a critic beside the policy, and of reward models, under every layout."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_backend.checkpoint import contents
from megatron_backend.models.tensors import RandomTensors
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.checkpoint import critic_ranks, reshard_ranks
from tests.megatron_backend.checkpoint.critic_ranks import POLICY, VALUES
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import CONFIGS

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2),
    Layout(cp=2),
    Layout(tp=2, sequence_parallel=True),
]


def staged(folder: Path) -> Path:
    for name in (contents.STATE, contents.RANDOM):
        (folder / name).mkdir(parents=True)
    return folder


def state(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and moments that `write_state` wrote anywhere under `folder`."""
    return {
        f"{file.parent.relative_to(folder)}:{name}": tensor
        for file in sorted(folder.rglob("model.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (Layout(tp=2), LAYOUTS),
        (Layout(pp=2), [Layout(pp=2), Layout()]),
        (Layout(dp=2), [Layout(dp=2), Layout()]),
    ],
    ids=str,
)
def test_policy_and_critic_under_every_layout(
    ranks: Ranks, tmp_path: Path, saved: Layout, loaded: list[Layout]
) -> None:
    """Bit for bit: weights and moments of both; in the same layout all that follows as well.

    One process reads the same from all checkpoints, and each layout reads what one process does.
    """
    checkpoint = staged(tmp_path / "checkpoint")
    losses = ranks.run(saved, critic_ranks.save, saved, checkpoint, tmp_path / "saved")[0]
    expected = state(tmp_path / "saved")
    heads = [name for name in expected if name.endswith(":score.weight")]
    assert len(heads) == 3
    assert all(tensor.abs().max() > 0 for tensor in expected.values())
    for layout in loaded:
        out, same = tmp_path / str(layout), layout == saved
        found = ranks.run(layout, critic_ranks.load, layout, checkpoint, out, same)[0]
        assert_equal(state(out), expected)
        assert found == (losses if same else pytest.approx(losses, rel=1e-6)), layout


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2)], ids=str)
def test_a_policy_that_has_not_learned_yet_is_saved(
    ranks: Ranks, tmp_path: Path, layout: Layout
) -> None:
    """While a critic warms up its policy's optimizer has no moments. At once and in the background,
    and into models that have some."""
    direct, copied = staged(tmp_path / "direct"), staged(tmp_path / "copied")
    losses = ranks.run(layout, critic_ranks.save_in_warmup, layout, direct, copied)[0]
    assert len(losses) == 4
    (one,) = ranks.run(Layout(), reshard_ranks.whole_tensors, direct)
    (other,) = ranks.run(Layout(), reshard_ranks.whole_tensors, copied)
    assert_equal(other, one)
    moments = [tensor for name, tensor in one.items() if name.startswith("optimizer.state.exp")]
    assert moments
    assert not any(tensor.any() for tensor in moments)
    for folder in (direct, copied):
        found = ranks.run(layout, critic_ranks.load_after_warmup, layout, folder, True)[0]
        assert found == losses
    split = Layout(tp=2)
    found = ranks.run(split, critic_ranks.load_after_warmup, split, direct, False)[0]
    assert found == pytest.approx(losses, rel=1e-6)


def test_names_of_a_critics_tensors_begin_with_its_prefix(ranks: Ranks, tmp_path: Path) -> None:
    """No name is both models', and the policy's are those of a job without a critic."""
    both, alone = staged(tmp_path / "both"), staged(tmp_path / "alone")
    ranks.run(Layout(), critic_ranks.save, Layout(), both, tmp_path / "a")
    ranks.run(Layout(), reshard_ranks.save, Layout(), POLICY, alone, tmp_path / "b")
    (with_critic,) = ranks.run(Layout(), reshard_ranks.whole_tensors, both)
    (without,) = ranks.run(Layout(), reshard_ranks.whole_tensors, alone)
    critics = {name for name in with_critic if name.startswith(contents.CRITIC)}
    assert with_critic.keys() - critics == without.keys()
    assert contents.CRITIC + "value_head.weight" in critics
    assert contents.CRITIC + "optimizer.state.exp_avg.value_head.weight" in critics


def test_a_reward_models_checkpoint_starts_models_under_every_layout(
    ranks: Ranks, tmp_path: Path
) -> None:
    saved = Layout(tp=2)
    checkpoint = staged(tmp_path / "checkpoint")
    ranks.run(saved, critic_ranks.save_values, saved, POLICY, checkpoint, tmp_path / "saved")
    expected = load_file(tmp_path / "saved" / "weights" / "model.safetensors")
    assert "score.weight" in expected
    for layout in LAYOUTS:
        out = tmp_path / str(layout)
        had_head = ranks.run(layout, critic_ranks.start_values, layout, POLICY, checkpoint, "", out)
        assert set(had_head) == {True}
        assert_equal(load_file(out / "model.safetensors"), expected)
    with pytest.raises(RuntimeError, match="a value head, which predicts no tokens"):
        ranks.run(Layout(), critic_ranks.start_policy, Layout(), POLICY, checkpoint)


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=str)
def test_a_policys_checkpoint_gives_all_but_the_head(
    ranks: Ranks, tmp_path: Path, layout: Layout
) -> None:
    """The head stays as it was, and is not the first row of an output layer; a critic's checkpoint
    beside it is found by its prefix."""
    checkpoint = staged(tmp_path / "checkpoint")
    ranks.run(Layout(), critic_ranks.save, Layout(), checkpoint, tmp_path / "saved")
    for name, prefix, kind in ((POLICY, "", "policy"), (VALUES, contents.CRITIC, contents.CRITIC)):
        out = tmp_path / kind
        had_head = ranks.run(
            layout, critic_ranks.start_values, layout, name, checkpoint, prefix, out
        )
        assert set(had_head) == {prefix != ""}
        found = load_file(out / "model.safetensors")
        expected = load_file(tmp_path / "saved" / kind / "weights" / "model.safetensors")
        if not prefix:
            config = ModelConfig.from_hf(CONFIGS[name])
            expected["score.weight"] = RandomTensors(config, 1, "value").read("score.weight")
        assert_equal(found, expected)


def test_an_untied_output_layer_is_not_taken_for_a_head(ranks: Ranks, tmp_path: Path) -> None:
    checkpoint = staged(tmp_path / "checkpoint")
    ranks.run(Layout(), reshard_ranks.save, Layout(), "llama", checkpoint, tmp_path / "saved")
    out = tmp_path / "out"
    had_head = ranks.run(
        Layout(), critic_ranks.start_values, Layout(), "llama", checkpoint, "", out
    )
    assert had_head == [False]
    config = ModelConfig.from_hf(CONFIGS["llama"])
    expected = RandomTensors(config, 1, "value").read("score.weight")
    assert torch.equal(load_file(out / "model.safetensors")["score.weight"], expected)
