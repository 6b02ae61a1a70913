"""The output layer: it computes what a loss needs, and no more of it at once than has room."""

import pytest
import torch

from algorithms.batch import Batch
from service.spec.layout import Layout
from service.spec.padding import padded_vocab_size
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.training.forward_runs import (
    count_rows,
    find_places,
    largest_of_a_step,
)
from tests.megatron_backend.training.training_runs import random_batch

WAYS = [
    {"micro_batch_tokens": 24},
    {"packing": False, "micro_batch_size": 2},
]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tp=2),
        Layout(tp=2, sequence_parallel=True),
        Layout(pp=2),
        Layout(pp=2, vpp=2),
        Layout(dp=2),
        Layout(cp=2),
    ],
    ids=str,
)
def test_only_trained_tokens_meet_the_output_layer(ranks: Ranks, layout: Layout) -> None:
    """Each of them once, packed and padded, in a step and where log-probs are read."""
    batch = random_batch()
    trained = int((batch.loss_mask[:, 1:] > 0).sum())
    assert 10 < trained < int(batch.lengths.sum()) < batch.tokens.numel()
    parts = ranks.run(layout, count_rows, layout, batch, WAYS)
    for way in range(len(WAYS)):
        for moment in range(2):
            counts = [part[way][moment] for part in parts]
            last = [layout.coordinates(rank).pp == layout.pp - 1 for rank in range(len(counts))]
            assert not any(
                count for count, is_last in zip(counts, last, strict=True) if not is_last
            )
            # Ranks that split the vocabulary see every token, each in its own columns.
            assert sum(counts) == trained * layout.tp


def masked(lengths: list[int], seed: int) -> Batch:
    """Rows with answers at random places."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths, default=1)
    real = torch.arange(width) < torch.tensor(lengths, dtype=torch.int64).unsqueeze(1)
    mask = torch.rand(real.shape, generator=generator) < 0.5
    return Batch(
        tokens=torch.zeros(real.shape, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        loss_mask=(mask & real).float(),
    )


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_each_trained_token_is_predicted_at_the_slot_before_it(
    ranks: Ranks, cp: int, packing: bool
) -> None:
    """But for a row's first, which nothing predicts. Among them: masks that are full, rows of one
    token, no rows at all."""
    batches = [masked([5, 1, 9, 8], seed) for seed in range(8)]
    batches += [masked([1], 1), masked([], 1), masked([7, 7, 7], 1)]
    batches[0].loss_mask.copy_(torch.arange(9) < batches[0].lengths.unsqueeze(1))
    (found,) = ranks.run(Layout(), find_places, batches, Layout(cp=cp), packing)
    for batch, parts in zip(batches, found, strict=True):
        wanted = batch.loss_mask > 0
        wanted[:, :1] = False
        tokens = torch.cat([tokens for _, tokens, _ in parts])
        assert torch.equal(tokens.sort().values, wanted.flatten().nonzero().squeeze(1))
        for slots, tokens, source in parts:
            assert torch.equal(source[slots] + 1, tokens)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sequence_parallel=True)], ids=str)
def test_no_step_makes_a_matrix_of_tokens_and_vocabulary(
    ranks: Ranks, layout: Layout, packing: bool
) -> None:
    """Forward, loss, backward, sums of gradients and the optimizer's step, in float32."""
    vocab = padded_vocab_size(4000, tp=layout.tp)
    batch = random_batch(rows=40, length=30, vocab=vocab)
    trained = int((batch.loss_mask[:, 1:] > 0).sum())
    whole = trained * vocab // layout.tp
    for elements, held in ranks.run(layout, largest_of_a_step, layout, batch, vocab, 64, packing):
        assert held < whole / 3
        assert elements <= max(held + 128 * layout.dp, 64 * vocab // layout.tp) < whole / 3
    usual = ranks.run(layout, largest_of_a_step, layout, batch, vocab, None, packing)
    assert [elements for elements, _ in usual] == [whole] * layout.world_size
