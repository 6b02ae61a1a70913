import pytest
from transformers import PreTrainedTokenizerFast

from algorithms.data.chat import ChatFormat
from algorithms.evaluate import Evaluator, evaluation_summary
from algorithms.rollout.collector import Collector
from algorithms.rollout.episode import Episode, Segment
from service.spec import RolloutSpec
from tests.algorithms.letters import Letters, LettersConfig
from tests.algorithms.scripted import ScriptedPolicy


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


def test_h08_answers_to_one_question_count_together() -> None:
    """Two questions, two answers each: one question is always right, the other one now and then."""
    episodes = [_episode(1.0), _episode(0.4, 0.6), _episode(0.0), _episode(1.0)]
    summary = evaluation_summary(episodes, best_reward=1.0, repeats=2)
    assert (summary["items"], summary["answers"]) == (2, 4)
    assert (summary["accuracy"], summary["pass_at_1"], summary["pass_at_2"]) == (0.75, 0.75, 1.0)


def test_sampled_questions_are_asked_several_times_and_greedy_ones_once(
    chatml: PreTrainedTokenizerFast,
) -> None:
    chat, environment = ChatFormat(chatml), Letters()
    answers = [["a"], ["b"], ["b"], ["b"], ["a"], ["b"]]
    collector = Collector(
        environment=environment,
        config=LettersConfig(),
        max_turns=1,
        generator=ScriptedPolicy(chat, answers, 100),
        chat=chat,
        max_new_tokens=8,
        timeout_seconds=5.0,
    )
    evaluator = Evaluator(
        collector=collector,
        items=[{"letter": "a", "number": 1}, {"letter": "b", "number": 2}],
        modes=["sampled", "greedy"],
        rollout=RolloutSpec(),
        seed=1,
        answers=2,
    )
    summary, samples = evaluator.evaluate("sampled")
    assert (summary["items"], summary["answers"]) == (2, 4)
    # `a` was asked for and once given; then twice `b`.
    assert (summary["pass_at_1"], summary["pass_at_2"]) == (0.75, 1.0)
    assert [(s["item"], s["reward"]) for s in samples] == [(0, 1.0), (1, 1.0)]
    summary, samples = evaluator.evaluate("greedy")
    assert (summary["items"], summary["answers"], summary["pass_at_1"]) == (2, 2, 1.0)
    assert "pass_at_2" not in summary
    assert [s["item"] for s in samples] == [0, 1]
