"""Rows that lie end to end say what each says alone, in all kinds of models and layouts."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from algorithms.batch import Batch, Normalizer
from megatron_backend.models.tensors import SINGLE_FILE
from megatron_backend.training.shares import RowShare, StepShare, gather_rows
from service.spec import GrpoSpec, OptimizerSpec, SftSpec
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import CONFIGS
from tests.megatron_backend.training.layout_runs import write_gradient
from tests.megatron_backend.training.training_runs import build_trainer, random_batch

GRPO = GrpoSpec(kl_coef=0.1, updates_per_rollout=2)
PACKED = {"packing": True, "micro_batch_tokens": 1000}
CUTS = [PACKED, {"packing": True, "micro_batch_tokens": 20}, {"packing": False}]
LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(cp=2),
    Layout(pp=2),
    Layout(dp=2),
    Layout(dp=2, ep=2),
    Layout(pp=2, vpp=2),
]
EXPERTS = [name for name in CONFIGS if "num_experts_per_tok" in CONFIGS[name]]
UNTIED = ["qwen3", "mistral", "mixtral", "qwen3_moe"]
"""Models whose embedding has no gradient but that of the tokens that were read."""
OURS = 2
"""The row that is looked at; the others are its neighbours."""
RARE = 60
"""Tokens from here on are the neighbours' alone."""


def models_for(layout: Layout) -> list[str]:
    """Experts under tensor parallelism need the sequence cut; others have none to spread."""
    if layout.ep > 1:
        return EXPERTS
    whole = layout.tp > 1 and not layout.sequence_parallel
    return [name for name in CONFIGS if not (whole and name in EXPERTS)]


def four_layers(name: str) -> Mapping[str, Any]:
    """Changes to a config, so that virtual stages can hold it."""
    sizes: dict[str, Any] = {"num_hidden_layers": 4}
    if "layer_types" in CONFIGS[name]:
        sizes["layer_types"] = [*CONFIGS[name]["layer_types"], "full_attention"]
    return sizes


def changed_neighbours(batch: Batch) -> Batch:
    """The batch with other tokens in every row but ours."""
    tokens = (batch.tokens + 17) % 101
    tokens[OURS] = batch.tokens[OURS]
    return dataclasses.replace(batch, tokens=tokens)


def observe(
    _rank: int, layout: Layout, models: Sequence[str], batches: Sequence[Batch]
) -> dict[str, list[RowShare | None]]:
    """Each model's log-probs of each batch."""
    observed = {}
    for name in models:
        trainer = build_trainer(name, layout, GRPO, **PACKED, **four_layers(name))
        observed[name] = [trainer.log_probs(batch) for batch in batches]
    return observed


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> dict[str, Tensor]:
    """Every model's log-probs of each row of `random_batch` alone, in one process."""
    batch = random_batch()
    rows = [batch.rows(slice(row, row + 1)) for row in range(len(batch))]
    (observed,) = ranks.run(Layout(), observe, Layout(), list(CONFIGS), rows)
    return {
        name: torch.cat([gather_rows(Layout(), [share]) for share in shares])
        for name, shares in observed.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_row_says_the_same_alone_and_between_others(
    ranks: Ranks, alone: dict[str, Tensor], layout: Layout
) -> None:
    """Experts take a row's tokens together with its neighbours', and may round otherwise then."""
    batch = random_batch()
    models = models_for(layout)
    parts = ranks.run(layout, observe, layout, models, [batch, changed_neighbours(batch)])
    for name in models:
        packed, changed = (
            gather_rows(layout, [part[name][place] for part in parts]) for place in range(2)
        )
        torch.testing.assert_close(packed, alone[name], rtol=1e-5, atol=1e-5, msg=name)
        assert torch.equal(packed != 0, batch.loss_mask > 0)
        rounding = 1e-6 if name in EXPERTS else 0.0
        torch.testing.assert_close(
            changed[OURS], packed[OURS], rtol=rounding, atol=rounding, msg=name
        )
        assert not torch.isclose(changed[3], packed[3]).all()


def train_on_ours(
    _rank: int, layout: Layout, models: Sequence[str], batch: Batch, to: Path
) -> None:
    """A step whose loss reads one row; each model's whole gradient in a folder of its name."""
    for name in models:
        trainer = build_trainer(
            name, layout, SftSpec(), optimizer_spec=OptimizerSpec(clip_grad=0.0), **PACKED
        )
        trainer.train_step(batch, Normalizer.of(batch), learning_rate=0)
        write_gradient(trainer, layout, ModelConfig.from_hf(CONFIGS[name]), to / name)


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(cp=2), Layout(tp=2, sequence_parallel=True), Layout(pp=2)],
    ids=str,
)
def test_a_row_has_no_gradient_to_its_neighbours(
    ranks: Ranks, tmp_path: Path, layout: Layout
) -> None:
    batch = random_batch(vocab=RARE)
    tokens = batch.tokens % 40 + RARE
    tokens[OURS] = batch.tokens[OURS]
    mask = torch.zeros_like(batch.loss_mask)
    mask[OURS] = batch.loss_mask[OURS]
    batch = dataclasses.replace(batch, tokens=tokens, loss_mask=mask)
    ranks.run(layout, train_on_ours, layout, UNTIED, batch, tmp_path)
    read = tokens[OURS, : int(batch.lengths[OURS]) - 1]  # nothing is predicted from the last one
    for name in UNTIED:
        gradient = load_file(tmp_path / name / SINGLE_FILE)["model.embed_tokens.weight"]
        assert gradient[read].abs().amax(dim=1).min() > 0, name
        assert not gradient[RARE:].any(), name


def old_and_new(
    _rank: int, layout: Layout, batch: Batch
) -> list[tuple[RowShare | None, StepShare]]:
    """The trainer's log-probs in one cut, and the step that reads them in the next."""
    results = []
    for index, options in enumerate(CUTS):
        trainer = build_trainer("qwen3", layout, GRPO, temperature=0.7, **options)
        old = trainer.log_probs(batch)
        other = build_trainer("qwen3", layout, GRPO, temperature=0.7, **CUTS[index - 1])
        step = other.train_step(with_old(layout, batch, old), Normalizer.of(batch), learning_rate=0)
        results.append((old, step))
    return results


def with_old(layout: Layout, batch: Batch, share: RowShare | None) -> Batch:
    """The batch with these log-probs as those of the old policy, known to every rank."""
    from megatron.core import parallel_state

    held: Tensor = torch.zeros(batch.tokens.shape)
    if share is not None:
        held[list(share.rows)] = torch.from_numpy(share.values)
    torch.distributed.all_reduce(held)
    assert parallel_state.get_data_parallel_world_size() == layout.dp
    return dataclasses.replace(batch, per_token={**batch.per_token, "old_log_probs": held})


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2), Layout(cp=2), Layout(tp=2, sequence_parallel=True), Layout(pp=2)],
    ids=str,
)
def test_the_ratio_is_one_before_any_update_a13(ranks: Ranks, layout: Layout) -> None:
    """Whatever the cut into micro-batches; and log-probs equal those of one process."""
    batch = random_batch(rows=7)
    (expected,) = ranks.run(Layout(), old_and_new, Layout(), batch)
    whole = gather_rows(Layout(), [expected[0][0]])
    parts = ranks.run(layout, old_and_new, layout, batch)
    for cut in range(len(CUTS)):
        shares = [part[cut] for part in parts]
        log_probs = gather_rows(layout, [share for share, _ in shares])
        torch.testing.assert_close(log_probs, whole, rtol=1e-5, atol=1e-5)
        sums = [shares[rank][1].sums["ratio_deviation"] for rank in layout.output_ranks]
        assert sum(count for _, count in sums) == len(batch)
        assert 0 <= sum(total for total, _ in sums) < 1e-4
