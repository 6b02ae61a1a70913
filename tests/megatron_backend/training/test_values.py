"""A model with a value head against transformers' trunk and a product by hand, in every layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from algorithms.batch import Batch, Normalizer, ValueOutputs
from megatron_backend.models.mapping import tensor_shapes
from megatron_backend.models.tensors import SINGLE_FILE, RandomTensors
from megatron_backend.training.shares import gather_rows, merge_step
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import CONFIGS
from tests.megatron_backend.training.training_runs import LEARNING_RATE
from tests.megatron_backend.training.value_runs import (
    PairsAndReturns,
    head_after,
    random_pairs,
    read,
    steps,
)

WAYS: list[dict[str, Any]] = [
    {"micro_batch_tokens": 24},
    {"packing": False, "micro_batch_size": 4},
]
LAYOUTS = [
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2),
    Layout(cp=2),
    Layout(tp=2, sequence_parallel=True),
]


def plain_trunk(name: str, folder: Path) -> tuple[transformers.PreTrainedModel, Tensor]:
    """transformers' decoder without any head, and the vector that our models start from."""
    config = ModelConfig.from_hf(CONFIGS[name])
    source = RandomTensors(config, 1, "value")
    tensors = {key: source.read(key) for key in tensor_shapes(config, "value")}
    head = tensors.pop("score.weight")
    folder.mkdir()
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return transformers.AutoModel.from_pretrained(folder, dtype=torch.float32), head


def plain_outputs(trunk: transformers.PreTrainedModel, head: Tensor, batch: Batch) -> ValueOutputs:
    """One row after another, without padding: the value of token i is that of the state before."""
    values, scores = [], []
    for tokens, length in zip(batch.tokens, batch.lengths.tolist(), strict=True):
        states = trunk(tokens[None, :length]).last_hidden_state[0]
        numbers = (states * head).sum(-1)
        padding = numbers.new_zeros(len(tokens) - length)
        values.append(torch.cat([numbers.new_zeros(1), numbers[:-1], padding]))
        scores.append(numbers[-1])
    return ValueOutputs(values=torch.stack(values) * batch.loss_mask, scores=torch.stack(scores))


@pytest.fixture(scope="module")
def trunks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`plain_trunk` of every model."""
    folder = tmp_path_factory.mktemp("trunks")
    return {name: plain_trunk(name, folder / name) for name in CONFIGS}


def check(ranks: Ranks, trunks: dict[str, Any], layout: Layout, names: list[str]) -> None:
    batch = random_pairs()
    answers = ranks.run(layout, read, names, layout, batch, WAYS)
    for index, name in enumerate(names):
        with torch.no_grad():
            expected = plain_outputs(*trunks[name], batch)
        assert expected.scores.std() > 0.1
        for way in range(len(WAYS)):
            values = gather_rows(layout, [answer[index][way][0] for answer in answers])
            scores = gather_rows(layout, [answer[index][way][1] for answer in answers])
            torch.testing.assert_close(values, expected.values, rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(scores, expected.scores, rtol=2e-5, atol=2e-5)
            assert not values[batch.loss_mask == 0].any()


def test_values_and_scores_of_every_family_equal_a_product_by_hand(
    ranks: Ranks, trunks: dict[str, Any]
) -> None:
    check(ranks, trunks, Layout(), list(CONFIGS))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_values_and_scores_do_not_depend_on_the_layout(
    ranks: Ranks, trunks: dict[str, Any], layout: Layout
) -> None:
    """Rows keep their places, though units are planned together."""
    check(ranks, trunks, layout, ["qwen2-tied", "llama"])


def test_steps_equal_plain_pytorch(ranks: Ranks, tmp_path: Path) -> None:
    """Loss and gradient norm of steps by transformers, torch's autograd and torch's AdamW."""
    name = "qwen2-tied"
    trunk, start = plain_trunk(name, tmp_path / "trained")
    head = torch.nn.Parameter(start)
    parameters = [*trunk.parameters(), head]
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
        betas=(0.9, 0.95),
    )
    batches = [random_pairs(seed=seed) for seed in range(3)]
    losses, norms = [], []
    for batch in batches:
        adam.zero_grad()
        outputs = plain_outputs(trunk, head, batch)
        loss = PairsAndReturns().loss(outputs, batch, Normalizer.of(batch)).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        adam.step()
        losses.append(loss.item())
    (shares,) = ranks.run(Layout(), steps, name, Layout(), batches, WAYS[0])
    results = [merge_step(Layout(), [share]) for share in shares]
    assert [result.loss for result in results] == pytest.approx(losses, rel=2e-5)
    assert [result.gradient_norm for result in results] == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_and_micro_batches_without_rows_take_part(ranks: Ranks, layout: Layout) -> None:
    """One pair, in one micro-batch: a second data-parallel rank has nothing, and half of the
    micro-batches of a pipeline have nothing either."""
    batches, name = [random_pairs(rows=2, seed=seed) for seed in range(2)], "qwen2-tied"
    (expected,) = ranks.run(Layout(), steps, name, Layout(), batches, {})
    shares = ranks.run(layout, steps, name, layout, batches, {})
    for step, share in enumerate(expected):
        found = merge_step(layout, [rank[step] for rank in shares])
        assert found.loss == pytest.approx(share.loss, rel=1e-5)
        assert found.gradient_norm == pytest.approx(share.gradient_norm, rel=1e-4)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sequence_parallel=True)], ids=str)
def test_bfloat16_says_nearly_the_same(ranks: Ranks, layout: Layout) -> None:
    """The head's product is in float32: what differs is the rounding of hidden states."""
    batches, name = [random_pairs(seed=1)] * 4, "qwen2-tied"
    (exact,) = ranks.run(Layout(), steps, name, Layout(), batches, {})
    shares = ranks.run(layout, steps, name, layout, batches, {"dtype": torch.bfloat16})
    for step, share in enumerate(exact):
        found = merge_step(layout, [rank[step] for rank in shares])
        assert found.loss == pytest.approx(share.loss, abs=0.02 * exact[0].loss)
    assert shares[0][-1].loss < shares[0][0].loss


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2), Layout(tp=2, sequence_parallel=True), Layout(cp=2), Layout(dp=2)],
    ids=str,
)
def test_a_head_stays_the_same_on_all_ranks(ranks: Ranks, layout: Layout) -> None:
    """To the bit: a checkpoint holds one of the copies."""
    batches = [random_pairs(seed=seed) for seed in range(5)]
    one, other = ranks.run(layout, head_after, "qwen2-tied", layout, batches)
    assert torch.equal(one, other)
    assert not torch.equal(one, ranks.run(layout, head_after, "qwen2-tied", layout, [])[0])


def test_a_value_model_gives_no_log_probs_and_the_other_way_round(ranks: Ranks) -> None:
    with pytest.raises(RuntimeError, match="was given a value model's outputs"):
        ranks.run(Layout(), ask_for_log_probs, random_pairs())
    with pytest.raises(RuntimeError, match="was given the outputs of a model that predicts tokens"):
        ranks.run(Layout(), ask_for_values, random_pairs())


def ask_for_log_probs(_rank: int, batch: Batch) -> None:
    from tests.megatron_backend.training.value_runs import value_trainer

    value_trainer("qwen2", Layout()).log_probs(batch)


def ask_for_values(_rank: int, batch: Batch) -> None:
    from tests.megatron_backend.training.training_runs import build_trainer

    build_trainer("qwen2", Layout(), PairsAndReturns()).values(batch)
