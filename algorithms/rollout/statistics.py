"""Numbers about a set of episodes."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from algorithms.errors import JobFailure
from algorithms.rollout.episode import Episode
from algorithms.rollout.groups import Drawn
from service.spec import Reason


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means over the episodes that did not fail; a mean over nothing is left out.

    `reward_std` is the sample standard deviation over all of them, not within groups. What an
    environment counts itself appears as `environment_<name>`, a mean over episodes.
    """
    played = [episode for episode in episodes if episode.error is None]
    rewards = [episode.reward for episode in played if episode.reward is not None]
    metrics: dict[str, float] = {
        "episodes": len(episodes),
        "episodes_failed": len(episodes) - len(played),
        "episodes_unscored": len(played) - len(rewards),
    }
    if rewards:
        metrics["reward_mean"] = math.fsum(rewards) / len(rewards)
        metrics["reward_std"] = _standard_deviation(rewards)
    if played:
        metrics["tool_rate"] = _share([episode.tool_calls > 0 for episode in played])
        metrics["malformed_tool_rate"] = _share([e.malformed_tool_calls > 0 for e in played])
        metrics["truncated_rate"] = _share([episode.truncated for episode in played])
        metrics["unfinished_rate"] = _share([episode.unfinished for episode in played])
        metrics["policy_tokens_mean"] = sum(sum(e.policy_mask) for e in played) / len(played)
        for name in sorted({name for episode in played for name in episode.metrics}):
            values = [e.metrics[name] for e in played if name in e.metrics]
            metrics[f"environment_{name}"] = math.fsum(values) / len(values)
    return metrics


def drawn_metrics(drawn: Drawn, *, best_reward: float) -> dict[str, float]:
    """Of all groups that were played: what they can teach, and how often they reach the best.

    `groups_masked` and `batches_drawn` tell whether dynamic sampling filled the batch.
    """
    groups = drawn.played
    return {
        "groups_drawn": len(groups),
        "groups_without_spread": sum(not group.has_spread for group in groups),
        "groups_masked": len(drawn.masked),
        "batches_drawn": drawn.batches,
        **pass_rates([group.episodes for group in groups], best_reward=best_reward),
    }


def pass_rates(answers: Sequence[Sequence[Episode]], *, best_reward: float) -> dict[str, float]:
    """`pass_at_<k>`: how likely one of k answers to a question has the best reward.

    For k of 1, 2, 4, ... and the number of answers. Of n scored answers with c right ones it is
    1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374, eq. 1); the mean is over questions
    that have k scored answers. An answer's reward is the sum over its turns.
    """
    most = max((len(episodes) for episodes in answers), default=0)
    counts = []
    for episodes in answers:
        scored = [episode for episode in episodes if episode.reward is not None]
        counts.append((len(scored), sum(e.reaches(best_reward) for e in scored)))
    rates = {}
    for k in sorted({1 << power for power in range(most.bit_length())} | {most} - {0}):
        found = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts if n >= k]
        if found:
            rates[f"pass_at_{k}"] = math.fsum(found) / len(found)
    return rates


def baseline_metrics(greedy: Sequence[Episode]) -> dict[str, float]:
    """Of the greedy answers that are baselines; nothing where there are none."""
    if not greedy:
        return {}
    rewards = [episode.reward for episode in greedy if episode.reward is not None]
    mean = {"baseline_reward_mean": math.fsum(rewards) / len(rewards)} if rewards else {}
    return {"baselines_unscored": len(greedy) - len(rewards), **mean}


def error_counts(episodes: Sequence[Episode]) -> dict[str, int]:
    """How many episodes failed, by exception class."""
    return dict(Counter(episode.error for episode in episodes if episode.error is not None))


def episode_warnings(episodes: Sequence[Episode]) -> list[Mapping[str, Any]]:
    """Warnings for people: of failed episodes, and of environments that could not be closed."""
    warnings: list[Mapping[str, Any]] = []
    failed = [episode for episode in episodes if episode.error is not None]
    if failed:
        message = (
            f"{len(failed)} of {len(episodes)} episodes failed and are not trained; "
            f"the first said: {failed[0].error}: {failed[0].error_message}"
        )
        warnings.append({"message": message[:2000], "errors": error_counts(episodes)})
    left_open = [episode for episode in episodes if episode.close_error]
    if left_open:
        message = (
            f"{len(left_open)} environments could not be closed, and may hold on to what they "
            f"opened; the first said: {left_open[0].close_error}"
        )
        warnings.append({"message": message[:2000]})
    return warnings


def refuse_many_errors(episodes: Sequence[Episode], max_error_rate: float) -> None:
    """Lets a few failed episodes pass.

    Raises:
        JobFailure: ENVIRONMENT_ERRORS, where the share that failed is above `max_error_rate`.
    """
    failed = [episode for episode in episodes if episode.error is not None]
    if len(failed) > max_error_rate * len(episodes):
        kinds = ", ".join(f"{count} {name}" for name, count in error_counts(episodes).items())
        raise JobFailure(
            Reason.ENVIRONMENT_ERRORS,
            f"{len(failed)} of {len(episodes)} episodes failed ({kinds}), more than "
            f"`rollout.max_error_rate` {max_error_rate:g} allows; the first said: "
            f"{failed[0].error}: {failed[0].error_message}",
        )


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags)


def _standard_deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
