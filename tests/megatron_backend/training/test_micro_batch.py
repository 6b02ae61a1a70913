"""Micro-batches hold each row once, at little more than its length."""

import pytest
import torch

from megatron_backend.training.micro_batch import micro_batches
from tests.megatron_backend.training.training_runs import random_batch

CPU = torch.device("cpu")


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("size", [None, 1, 2, 4])
def test_each_row_of_the_share_once(size: int | None, stages: int) -> None:
    batch = random_batch(rows=7)
    parts = micro_batches(batch, range(1, 7), size=size, stages=stages, device=CPU)
    assert sorted(row for part in parts for row in part.rows) == [1, 2, 3, 4, 5, 6]
    for part in parts:
        for index, row in enumerate(part.rows):
            length = int(batch.lengths[row])
            assert torch.equal(part.tokens[index, :length], batch.tokens[row, :length])
            assert (
                part.batch.per_sequence["advantages"][index]
                == (batch.per_sequence["advantages"][row])
            )
    if stages > 1:
        assert len({part.tokens.shape for part in parts}) == 1
    else:
        assert all(part.tokens.shape[1] == part.batch.lengths.max() for part in parts)


def test_much_shorter_rows_go_apart() -> None:
    batch = random_batch(rows=40, length=80)
    batch.lengths[:30], batch.lengths[30:] = 10, 80
    parts = micro_batches(batch, range(40), size=None, stages=1, device=CPU)
    assert [part.tokens.shape for part in parts] == [(10, 80), (30, 10)]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_share_without_rows_is_one_filler(stages: int) -> None:
    (part,) = micro_batches(random_batch(), range(0), size=2, stages=stages, device=CPU)
    assert len(part.batch) == 0
    assert part.rows == []
    assert part.tokens.shape == ((2, 13) if stages > 1 else (1, 1))


def test_a_pass_holds_a_bounded_number_of_tokens() -> None:
    batch = random_batch(rows=30, length=1000)
    batch.lengths[:] = 1000
    parts = micro_batches(batch, range(30), size=None, stages=1, device=CPU)
    assert [len(part.rows) for part in parts] == [16, 14]
    long = random_batch(rows=3, length=20_000)
    assert len(micro_batches(long, range(3), size=None, stages=2, device=CPU)) == 3


def test_stages_of_a_pipeline_overlap() -> None:
    parts = micro_batches(random_batch(rows=16), range(16), size=None, stages=2, device=CPU)
    assert [len(part.rows) for part in parts] == [4, 4, 4, 4]
