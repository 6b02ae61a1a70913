"""A running job's metrics, from its newest events.

The service and the driver expose the same series under the same names: the service of every job
that runs, from the events that it holds; the driver of its own job alone, also while the service is
away. They live as long as the job does, so that job ids make no series without end.

Only what is named here is exposed. An environment or an algorithm of somebody else's may put any
number of names into a `metrics` event; they are in the job's record, and in no label.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from service.spec.attempt import JobContext
from service.spec.metric import Metric, MetricKind, MetricSource

JOB_LABELS = ("job_id", "algorithm", "cluster")
"""Every job's series has these."""

PHASES = ("data", "rollout", "reward", "logprobs", "advantage", "update", "sync")
"""Of a step; see `algorithms.phases`."""

EVALUATION_MODES = ("sampled", "greedy", "validation")


def _job(name: str, help: str, *labels: str) -> Metric:
    return Metric(
        name=f"planish_job_{name}",
        kind=MetricKind.GAUGE,
        source=MetricSource.JOB,
        help=help,
        labels=(*JOB_LABELS, *labels),
    )


OF_STEPS: Mapping[str, Metric] = {
    "loss": _job("loss", "Loss of the newest step."),
    "value_loss": _job("value_loss", "The critic's loss in the newest step."),
    "gradient_norm": _job("gradient_norm", "Norm of the gradient before it was clipped."),
    "critic_gradient_norm": _job("critic_gradient_norm", "Norm of the critic's gradient."),
    "learning_rate": _job("learning_rate", "Learning rate of the newest step."),
    "entropy": _job("entropy", "Mean entropy of the policy over trained tokens, in nats."),
    "kl": _job("kl", "Mean KL estimate to the reference over trained tokens, in nats."),
    "reward_kl": _job("reward_kl", "Mean KL estimate to the reference over answers, in nats."),
    "approx_kl": _job("approx_kl", "Mean KL estimate from the old policy over tokens, in nats."),
    "ratio_clip_fraction": _job(
        "ratio_clip_fraction", "Share of trained tokens whose probability ratio was clipped."
    ),
    "rollout_kl": _job(
        "rollout_kl",
        "Mean KL estimate between the generator's and the trainer's log-probs, in nats.",
    ),
    "rollout_ratio_deviation": _job(
        "rollout_ratio_deviation",
        "Largest distance from 1 of the trainer's and the generator's probability ratio.",
    ),
    "reward_mean": _job("reward_mean", "Mean reward of the newest step's scored episodes."),
    "reward_std": _job("reward_std", "Standard deviation of the newest step's rewards."),
    "reward_model_mean": _job("reward_model_mean", "Mean score that the reward model gave."),
    "reward_margin": _job("reward_margin", "Mean distance of chosen and rejected rewards."),
    "reward_accuracy": _job("reward_accuracy", "Share of pairs where the chosen one is ahead."),
    "explained_variance": _job(
        "explained_variance", "Share of the returns' variance that the critic foresaw."
    ),
    "episodes": _job("step_episodes", "Episodes of the newest step."),
    "episodes_failed": _job("step_episodes_failed", "Of them, those whose environment failed."),
    "episodes_unscored": _job("step_episodes_unscored", "Of them, those without a reward."),
    "pass_at_1": _job("pass_at_1", "Share of the newest step's answers with the best reward."),
    "tool_rate": _job("tool_rate", "Share of episodes with a tool call."),
    "truncated_rate": _job("truncated_rate", "Share of episodes that were cut."),
    "policy_tokens_mean": _job("policy_tokens_mean", "Mean tokens that the policy wrote."),
    "groups_flat_rate": _job(
        "groups_flat_rate", "Share of groups whose answers all earned the same."
    ),
    "tokens": _job("step_tokens", "Trained tokens of the newest step."),
    "flops_per_second": _job(
        "flops_per_second",
        "Operations a second and rank that the model's update asked for (model FLOPs).",
    ),
    "mfu": _job("mfu", "Model FLOPs utilization: the share of the GPU's dense bf16 peak."),
    "samples": _job("step_samples", "Sequences with trained tokens in the newest step."),
}
"""By the name in a `metrics` event."""

STEP = _job("step", "Newest step that was done.")
TOTAL_STEPS = _job("steps_planned", "Steps that the job takes in all.")
EVENT_AT = _job("event_timestamp_seconds", "When the newest event was made, seconds since 1970.")
STEP_AT = _job("step_timestamp_seconds", "When the newest step was done, seconds since 1970.")
STEP_SECONDS = _job("step_seconds", "Time that the newest step's phases took, in seconds.")
PHASE_SECONDS = _job(
    "phase_seconds", "Time that a phase of the newest step took, in seconds.", "phase"
)
TOKENS_PER_SECOND = _job("tokens_per_second", "Trained tokens of the newest step per second.")
RANKS = _job("ranks", "Ranks of the trained model.")
CHECKPOINT_STEP = _job("checkpoint_step", "Step of the newest published checkpoint.")
CHECKPOINT_AT = _job(
    "checkpoint_timestamp_seconds", "When the newest checkpoint was published, since 1970."
)
CHECKPOINT_SECONDS = _job(
    "checkpoint_seconds", "Time from the newest checkpoint's request to its publication."
)
CHECKPOINT_STALL_SECONDS = _job(
    "checkpoint_stall_seconds", "Of it, the time that training waited, in seconds."
)
CHECKPOINT_BYTES = _job("checkpoint_bytes", "Size of the newest checkpoint.")
CHECKPOINTS_MISSED = _job(
    "checkpoints_missed", "Saves in a row that the storage refused; 0 after one that was published."
)
EVALUATION: Mapping[str, Metric] = {
    "accuracy": _job("evaluation_accuracy", "Accuracy in the newest evaluation.", "mode"),
    "reward_mean": _job("evaluation_reward_mean", "Mean reward in the newest evaluation.", "mode"),
    "loss": _job("evaluation_loss", "Loss in the newest evaluation.", "mode"),
}
"""By the name in an `evaluation` event."""

_OF_CHECKPOINTS: Mapping[str, Metric] = {
    "step": CHECKPOINT_STEP,
    "seconds": CHECKPOINT_SECONDS,
    "stall_seconds": CHECKPOINT_STALL_SECONDS,
    "bytes": CHECKPOINT_BYTES,
}

JOB_METRICS: tuple[Metric, ...] = (
    STEP,
    TOTAL_STEPS,
    EVENT_AT,
    STEP_AT,
    STEP_SECONDS,
    PHASE_SECONDS,
    TOKENS_PER_SECOND,
    RANKS,
    CHECKPOINTS_MISSED,
    CHECKPOINT_AT,
    *_OF_CHECKPOINTS.values(),
    *EVALUATION.values(),
    *OF_STEPS.values(),
)
"""All that `JobReadings` may yield."""

KINDS = ("started", "progress", "metrics", "checkpoint", "evaluation", "warning")
"""Of the events that say something here."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One value; `labels` are those beyond `JOB_LABELS`, in the metric's order."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


class JobReadings:
    """What the newest events of one job say. Give it the events in their order."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[str, ...]], Reading] = {}

    def take(self, kind: str, time: float, step: int | None, data: Mapping[str, Any]) -> None:
        """Takes in one event; what it says replaces what an earlier one said."""
        self._set(EVENT_AT, time)
        match kind:
            case "started":
                self._set(RANKS, data.get("world_size"))
                self._set(CHECKPOINTS_MISSED, 0)
            case "progress":
                self._set(STEP, data.get("step"))
                self._set(TOTAL_STEPS, data.get("total_steps"))
            case "metrics":
                self._take_step(time, step, data)
            case "checkpoint":
                self._set(CHECKPOINT_AT, time)
                self._set(CHECKPOINTS_MISSED, 0)
                for name, metric in _OF_CHECKPOINTS.items():
                    self._set(metric, data.get(name))
            case "evaluation" if data.get("mode") in EVALUATION_MODES:
                for name, metric in EVALUATION.items():
                    self._set(metric, data.get(name), str(data["mode"]))
            case "warning":
                self._set(CHECKPOINTS_MISSED, data.get("missed"))

    def __iter__(self) -> Iterator[Reading]:
        """Every value that is known."""
        return iter(self._values.values())

    def _take_step(self, time: float, step: int | None, data: Mapping[str, Any]) -> None:
        self._set(STEP, step)
        self._set(STEP_AT, time)
        for name, metric in OF_STEPS.items():
            self._replace(metric, data, name)
        phases = phase_seconds(data)
        for phase in PHASES:
            if phase in phases:
                self._set(PHASE_SECONDS, phases[phase], phase)
        seconds = math.fsum(phases.values())
        if seconds > 0:
            self._set(STEP_SECONDS, seconds)
            self._set(TOKENS_PER_SECOND, number(data, "tokens") / seconds)

    def _replace(self, metric: Metric, data: Mapping[str, Any], name: str) -> None:
        """A value that the newest step does not have is not shown as if it had."""
        if name in data:
            # Null stands for NaN or infinity, which JSON does not have.
            self._set(metric, math.nan if data[name] is None else data[name])
        else:
            self._values.pop((metric.name, ()), None)

    def _set(self, metric: Metric, value: object, *labels: str) -> None:
        if isinstance(value, int | float):
            self._values[metric.name, labels] = Reading(metric, float(value), labels)


def phase_seconds(data: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of each known phase that a `metrics` event holds."""
    found = {phase: data.get(f"seconds_{phase}") for phase in PHASES}
    return {phase: float(s) for phase, s in found.items() if isinstance(s, int | float)}


def number(data: Mapping[str, Any], name: str) -> float:
    """A finite number of an event; 0 where there is none."""
    value = data.get(name)
    known = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if known and value is not None else 0.0


def job_labels(context: JobContext) -> tuple[str, str, str]:
    """The values of `JOB_LABELS`."""
    return context.job_id, context.spec.algorithm.type, context.spec.resources.cluster
