"""Rows that lie end to end say what each says alone, in all kinds of models and layouts."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from algorithms.batch import Batch, Normalizer
from megatron_backend.training.shares import RowShare, StepShare, gather_rows
from service.spec import GrpoSpec
from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.training.training_runs import build_trainer, random_batch

GRPO = GrpoSpec(kl_coef=0.1, updates_per_rollout=2)
MODELS = ["qwen2-tied", "qwen3", "mistral", "gemma2", "gemma3_text"]
PACKED = {"packing": True, "micro_batch_tokens": 1000}
CUTS = [PACKED, {"packing": True, "micro_batch_tokens": 20}, {"packing": False}]


def changed_neighbours(batch: Batch) -> Batch:
    """The batch with other tokens in every row but the third."""
    tokens = (batch.tokens + 17) % 101
    tokens[2] = batch.tokens[2]
    return dataclasses.replace(batch, tokens=tokens)


def observe(_rank: int, models: Sequence[str], batch: Batch) -> list[list[RowShare | None]]:
    """Log-probs of each model: of each row alone, of the batch, and with other neighbours."""
    results = []
    for name in models:
        trainer = build_trainer(name, Layout(), GRPO, **PACKED)
        rows = [batch.rows(slice(row, row + 1)) for row in range(len(batch))]
        results.append([trainer.log_probs(b) for b in (*rows, batch, changed_neighbours(batch))])
    return results


def test_a_row_says_the_same_alone_and_between_others(ranks: Ranks) -> None:
    batch = random_batch()
    (observed,) = ranks.run(Layout(), observe, MODELS, batch)
    for shares in observed:
        *alone, packed, changed = (gather_rows(Layout(), [share]) for share in shares)
        torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)
        assert torch.equal(packed != 0, batch.loss_mask > 0)
        assert torch.equal(changed[2], packed[2])
        assert not torch.isclose(changed[3], packed[3]).all()


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
