"""The logits of a model that is cut in every way, against those of one process."""

import pytest
import torch
from torch import Tensor

from service.spec import SftSpec
from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.training.training_runs import build_trainer


def logits(_rank: int, layout: Layout, tokens: Tensor) -> Tensor | None:
    from megatron_backend.workers.logits import whole_logits

    trainer = build_trainer("qwen2-tied", layout, SftSpec(), num_hidden_layers=4)
    return whole_logits(trainer.chunks, tokens, vocab_size=101)


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, sequence_parallel=True), Layout(cp=2), Layout(pp=2, vpp=2)],
    ids=str,
)
def test_logits_are_whole_in_every_layout(ranks: Ranks, layout: Layout) -> None:
    """7 tokens, which neither sequence nor context parallelism divides."""
    tokens = torch.randint(0, 101, (3, 7), generator=torch.Generator().manual_seed(1))
    (expected,) = ranks.run(Layout(), logits, Layout(), tokens)
    assert expected.shape == (3, 7, 101)
    parts = ranks.run(layout, logits, layout, tokens)
    for rank, part in enumerate(parts):
        if layout.coordinates(rank).pp == layout.pp - 1:
            torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4)
        else:
            assert part is None
