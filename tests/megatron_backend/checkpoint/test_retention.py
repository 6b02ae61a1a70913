"""Which checkpoints stay."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_backend.checkpoint.retention import Retention, score_of
from service.spec import BestSpec, CheckpointSpec

BEST = BestSpec(metric="accuracy")
LOWEST = BestSpec(metric="loss", higher_is_better=False)
scores = st.dictionaries(
    st.integers(1, 40), st.none() | st.sampled_from([0.0, 0.25, 0.5, 0.75]), min_size=1
)


@given(scores, st.integers(1, 5), st.none() | st.integers(1, 9), st.sampled_from([None, BEST]))
def test_what_stays(
    scores: dict[int, float | None], last: int, every: int | None, best: BestSpec | None
) -> None:
    retention = Retention(last=last, every=every, best=best)
    kept = retention.kept(scores)
    assert kept <= scores.keys()
    assert max(scores) in kept
    assert set(sorted(scores)[-last:]) <= kept
    for step in kept - set(sorted(scores)[-last:]):
        is_best = step == retention.best_step(scores)
        assert is_best or (every is not None and step % every == 0)
    assert retention.kept({step: scores[step] for step in kept}) == kept  # nothing more goes later


def test_the_best_is_the_newest_of_equal_ones() -> None:
    assert Retention(best=BEST).best_step({10: 0.8, 20: 0.5, 30: 0.8, 40: None}) == 30
    assert Retention(best=LOWEST).best_step({10: 0.8, 20: 0.5, 30: 0.5}) == 30
    assert Retention(best=BEST).best_step({10: None}) is None
    assert Retention().best_step({10: 0.8}) is None


def test_a_spec_becomes_a_retention() -> None:
    spec = CheckpointSpec(keep_last=3, keep_every=10, keep_best=BEST)
    assert Retention.of(spec) == Retention(last=3, every=10, best=BEST)


@pytest.mark.parametrize(
    ("metric", "score"),
    [
        ("accuracy", 0.25),
        ("greedy/accuracy", 0.75),
        ("loss", 2.0),
        ("validation/loss", 2.0),
        ("sampled/loss", None),
        ("reward_mean", None),
        ("mode", None),
        ("flag", None),
        ("endless", None),
    ],
)
def test_the_number_of_an_evaluation(metric: str, score: float | None) -> None:
    evaluations = [
        {"mode": "validation", "loss": 2, "flag": True, "endless": math.inf},
        {"mode": "sampled", "accuracy": 0.25},
        {"mode": "greedy", "accuracy": 0.75},
    ]
    assert score_of(evaluations, BestSpec(metric=metric)) == score
    assert score_of(evaluations, None) is None
