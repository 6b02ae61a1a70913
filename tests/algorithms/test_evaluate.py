import pytest

from algorithms.evaluate import evaluation_summary
from algorithms.rollout.episode import Episode, Segment


def _episode(*rewards: float | None, **fields: object) -> Episode:
    segment = Segment(origin="policy", token_ids=[1, 2], log_probs=[-1.0, -1.0])
    return Episode(item={}, segments=[segment], rewards=list(rewards), **fields)


def test_accuracy_is_the_share_that_reached_the_best_reward() -> None:
    failed = _episode(1.0)
    failed.fail(ValueError("x"))
    episodes = [
        _episode(0.1, 0.2, 0.7, tool_calls=2),  # 1.0 but for rounding
        _episode(0.5),
        _episode(0.0, truncated=True),
        _episode(1.0, tool_calls=1),
        _episode(None),
        failed,
    ]
    summary = evaluation_summary(episodes, best_reward=1.0)
    assert summary == {
        "items": 6,
        "answers": 6,
        "accuracy": 0.5,
        "pass_at_1": 0.5,
        "reward_mean": pytest.approx(0.625),
        "tool_rate": pytest.approx(0.4),
        "truncated_rate": pytest.approx(0.2),
        "error_count": 1,
        "unscored_count": 1,
    }


def test_nothing_scored_gives_no_number_and_no_nan() -> None:
    summary = evaluation_summary([_episode(None)], best_reward=1.0)
    assert (summary["accuracy"], summary["reward_mean"]) == (None, None)
