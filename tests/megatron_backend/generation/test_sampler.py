"""Draws from logits: exact probabilities, padding, and what the log-prob is of."""

import math

import pytest
import torch
from torch import Tensor

from megatron_backend.generation.draws import uniforms
from megatron_backend.generation.sampler import VocabularyShard, greedy, sample
from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks

# 0.999 quantile of chi-square with 5 degrees of freedom.
CHI_SQUARE_5 = 20.515


def whole(real: int) -> VocabularyShard:
    return VocabularyShard(start=0, real=real, group=None)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0])
    temperature, count = 0.8, 20_000
    probabilities = (logits.double() / temperature).softmax(0)
    numbers = torch.from_numpy(uniforms(3, range(count), [7] * count, 1)[:, 0])
    tokens, _ = sample(
        logits.expand(count, -1).clone(), temperature=temperature, uniforms=numbers, shard=whole(6)
    )
    expected = probabilities * count
    statistic = ((torch.bincount(tokens, minlength=6) - expected).square() / expected).sum()
    assert statistic < CHI_SQUARE_5


def test_a_draw_is_the_first_token_above_the_number() -> None:
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log().expand(6, -1).clone()
    numbers = torch.tensor([1e-9, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2.0**-53]).double()
    tokens, log_probs = sample(logits, temperature=1.0, uniforms=numbers, shard=whole(3))
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    assert log_probs.exp().tolist() == pytest.approx([0.25, 0.25, 0.5, 0.5, 0.25, 0.25])


def test_a15_the_log_prob_is_after_temperature() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    tokens, log_probs = sample(
        logits, temperature=0.5, uniforms=torch.tensor([0.5]).double(), shard=whole(2)
    )
    assert tokens.tolist() == [1]
    assert log_probs.item() == pytest.approx(-0.105361, abs=1e-6)


def test_greedy_reports_temperature_one_and_takes_the_lowest_of_equals() -> None:
    tokens, log_probs = greedy(torch.tensor([[0.0, math.log(3.0)], [2.0, 2.0]]), shard=whole(2))
    assert tokens.tolist() == [1, 0]
    assert log_probs.tolist() == pytest.approx([math.log(0.75), math.log(0.5)])


def test_e06_padded_vocabulary_is_never_drawn_and_has_no_mass() -> None:
    """Three real tokens padded to four, all real logits 0, the padding's far above them."""
    count = 3000
    logits = torch.tensor([0.0, 0.0, 0.0, 50.0]).expand(count, -1)
    numbers = torch.from_numpy(uniforms(1, range(count), [0] * count, 1)[:, 0])
    tokens, log_probs = sample(logits.clone(), temperature=1.0, uniforms=numbers, shard=whole(3))
    assert torch.bincount(tokens, minlength=4)[3] == 0
    assert torch.allclose(log_probs, torch.tensor(-1.098612))
    tokens, log_probs = greedy(logits[:2].clone(), shard=whole(3))
    assert tokens.tolist() == [0, 0]
    assert torch.allclose(log_probs, torch.tensor(-1.098612))


def test_tokens_without_mass_are_not_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(3, -1).clone()
    numbers = torch.tensor([2.0**-53, 0.5, 1 - 2.0**-53]).double()
    tokens, _ = sample(logits, temperature=1.0, uniforms=numbers, shard=whole(3))
    assert tokens.tolist() == [1, 1, 1]


@pytest.mark.parametrize("width", [128, 96, 24, 7])
def test_wide_rows_give_what_looking_at_each_column_gives(width: int) -> None:
    """Blocks of 64, 32, 8 and 1 columns, equals among the largest, against plain arithmetic."""
    generator = torch.Generator().manual_seed(width)
    logits = torch.randint(-4, 5, (2000, width), generator=generator) / 2.0
    numbers = torch.from_numpy(uniforms(5, range(2000), [1] * 2000, 1)[:, 0])
    tokens, log_probs = sample(
        logits.clone(), temperature=0.5, uniforms=numbers, shard=whole(width)
    )
    wanted = (logits.double() / 0.5).log_softmax(-1)
    ends = wanted.exp().cumsum(-1)
    assert torch.equal(tokens, (ends <= numbers[:, None]).sum(-1))
    assert torch.allclose(log_probs.double(), wanted.gather(1, tokens[:, None])[:, 0], atol=1e-5)
    tokens, log_probs = greedy(logits.clone(), shard=whole(width))
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(tokens, first)
    assert torch.allclose(log_probs.double(), logits.double().log_softmax(-1).amax(-1), atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = torch.tensor([[0.0, 1.0], [bad, 0.0]])
    numbers = torch.tensor([0.5, 0.5]).double()
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(logits.clone(), temperature=1.0, uniforms=numbers, shard=whole(2))
    with pytest.raises(FloatingPointError, match="not finite"):
        greedy(logits.clone(), shard=whole(2))


def _on_a_shard(
    rank: int, logits: Tensor, numbers: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from megatron.core import parallel_state

    from megatron_backend.models.vocabulary import real_columns

    width = logits.shape[1] // 2
    shard = VocabularyShard(
        start=width * rank,
        real=real_columns(vocabulary, width=width, tp_rank=rank),
        group=parallel_state.get_tensor_model_parallel_group(),
    )
    mine = logits[:, width * rank : width * (rank + 1)]
    drawn = sample(mine.clone(), temperature=0.7, uniforms=numbers, shard=shard)
    return *drawn, *greedy(mine.clone(), shard=shard)


@pytest.mark.parametrize("vocabulary", [16, 11, 8, 5])
def test_e06_a_split_vocabulary_draws_the_same_tokens(ranks: Ranks, vocabulary: int) -> None:
    """11 real tokens of 16 leave padding on the last rank, 8 and 5 leave nothing else there."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(500, 16, generator=generator)
    logits[:, vocabulary:] = 100.0
    numbers = torch.from_numpy(uniforms(9, range(500), [3] * 500, 1)[:, 0])
    expected = (
        *sample(logits.clone(), temperature=0.7, uniforms=numbers, shard=whole(vocabulary)),
        *greedy(logits.clone(), shard=whole(vocabulary)),
    )
    for answers in ranks.run(Layout(tp=2), _on_a_shard, logits, numbers, vocabulary):
        for found, one in zip(answers, expected, strict=True):
            if found.dtype == torch.int64:
                assert torch.equal(found, one)
            else:
                assert torch.allclose(found, one, atol=1e-6)
