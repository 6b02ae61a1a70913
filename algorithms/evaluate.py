"""Held-out questions, played as in training but never trained on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from algorithms.phases import PhaseClock
from algorithms.rollout.collector import Collector
from algorithms.rollout.episode import Episode
from algorithms.rollout.statistics import episode_metrics, refuse_many_errors
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

    def evaluate(self, mode: DecodingMode) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Plays every question once.

        Returns:
            The data of an `evaluation` event, and of a `sample` event for each of the first
            questions: the same ones each time, so that transcripts can be compared.

        Raises:
            JobFailure: ENVIRONMENT_ERRORS.
        """
        episodes = self.collector.collect(
            self.items,
            temperature=self.rollout.temperature if mode == "sampled" else 0.0,
            seed=derive_seed(self.seed, "evaluation", mode),
            clock=PhaseClock(),
        )
        refuse_many_errors(episodes, self.rollout.max_error_rate)
        best = self.collector.environment.reward_range[1]
        return (
            {"mode": mode, **evaluation_summary(episodes, best_reward=best)},
            [
                {"mode": mode, "item": place, "messages": e.messages, "reward": e.reward}
                for place, e in enumerate(episodes[:TRANSCRIPTS])
            ],
        )


def evaluation_summary(episodes: Sequence[Episode], *, best_reward: float) -> dict[str, Any]:
    """Accuracy is the share of scored episodes that reached the best reward there is.

    Failed and unscored episodes are counted apart; they are neither right nor wrong.
    """
    metrics = episode_metrics(episodes)
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    right = [r >= best_reward or math.isclose(r, best_reward, rel_tol=1e-9) for r in rewards]
    return {
        "items": len(episodes),
        "accuracy": sum(right) / len(right) if right else None,
        "reward_mean": metrics.get("reward_mean"),
        "tool_rate": metrics.get("tool_rate"),
        "truncated_rate": metrics.get("truncated_rate"),
        "error_count": int(metrics["episodes_failed"]),
        "unscored_count": int(metrics["episodes_unscored"]),
    }
