"""Held-out questions, played as in training but never trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from algorithms.phases import PhaseClock
from algorithms.rollout.collector import Collector
from algorithms.rollout.episode import Episode
from algorithms.rollout.statistics import episode_metrics, pass_rates, refuse_many_errors
from algorithms.seeds import derive_seed
from environments.protocol import Item
from service.spec import RolloutSpec
from service.spec.parts import DecodingMode

TRANSCRIPTS = 8
"""Questions of each evaluation whose transcripts are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """The same questions, and the same random draws, at every evaluation of a job."""

    collector: Collector
    items: Sequence[Item]
    modes: Sequence[DecodingMode]
    rollout: RolloutSpec
    seed: int
    answers: int = 1
    """How often each question is asked in the sampled mode."""

    def evaluate(self, mode: DecodingMode) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Plays every question.

        Returns:
            The data of an `evaluation` event, and of a `sample` event for the first answer to each
            of the first questions: the same ones each time, so that transcripts can be compared.

        Raises:
            JobFailure: ENVIRONMENT_ERRORS.
        """
        repeats = self.answers if mode == "sampled" else 1  # greedy answers would all be the same
        episodes = self.collector.collect(
            self.items,
            repeats=repeats,
            temperature=self.rollout.temperature if mode == "sampled" else 0.0,
            seed=derive_seed(self.seed, "evaluation", mode),
            clock=PhaseClock(),
        )
        refuse_many_errors(episodes, self.rollout.max_error_rate)
        best = self.collector.environment.reward_range[1]
        return (
            {"mode": mode, **evaluation_summary(episodes, best_reward=best, repeats=repeats)},
            [
                {"mode": mode, "item": place, "messages": e.messages, "reward": e.reward}
                for place, e in enumerate(episodes[: TRANSCRIPTS * repeats : repeats])
            ],
        )


def evaluation_summary(
    episodes: Sequence[Episode], *, best_reward: float, repeats: int = 1
) -> dict[str, Any]:
    """Accuracy is the share of scored episodes that reached the best reward there is.

    Failed and unscored episodes are counted apart; they are neither right nor wrong.

    Args:
        episodes: the answers to a question stand side by side.
        best_reward: of the environment.
        repeats: answers to each question.
    """
    metrics = episode_metrics(episodes)
    right = [e.reaches(best_reward) for e in episodes if e.reward is not None]
    answers = [episodes[start : start + repeats] for start in range(0, len(episodes), repeats)]
    return {
        "items": len(answers),
        "answers": len(episodes),
        "accuracy": sum(right) / len(right) if right else None,
        **pass_rates(answers, best_reward=best_reward),
        "reward_mean": metrics.get("reward_mean"),
        "tool_rate": metrics.get("tool_rate"),
        "truncated_rate": metrics.get("truncated_rate"),
        "error_count": int(metrics["episodes_failed"]),
        "unscored_count": int(metrics["episodes_unscored"]),
    }
