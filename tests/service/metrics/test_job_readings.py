"""What a job's newest events say, as metrics."""

import math
from typing import Any

import pytest

from service.spec.job_metrics import JOB_METRICS, JobReadings
from service.spec.metric import Metric


def values(*events: tuple[str, int | None, dict[str, Any]]) -> dict[tuple[str, ...], float]:
    readings = JobReadings()
    for time, (kind, step, data) in enumerate(events):
        readings.take(kind, float(time), step, data)
    return {
        (reading.metric.name.removeprefix("planish_job_"), *reading.labels): reading.value
        for reading in readings
    }


STEP = {
    "loss": 0.5,
    "kl": 0.1,
    "tokens": 300,
    "seconds_rollout": 2.0,
    "seconds_update": 1.0,
    "seconds_lunch": 60.0,
    "environment_of_somebody_else": 4.0,
}


def test_a_step_says_its_losses_and_its_phases() -> None:
    found = values(("metrics", 7, STEP))
    assert found["loss",] == 0.5
    assert found["step",] == 7
    assert found["phase_seconds", "rollout"] == 2.0
    assert found["step_seconds",] == 3.0
    assert found["tokens_per_second",] == 100.0


def test_only_names_of_the_catalogue_are_told() -> None:
    """An environment may count whatever it likes; it makes no series (H01)."""
    readings = JobReadings()
    readings.take("metrics", 0.0, 1, STEP | {f"environment_{n}": 1.0 for n in range(1000)})
    known = {metric.name for metric in JOB_METRICS}
    assert {reading.metric.name for reading in readings} <= known
    assert len(list(readings)) < 15


def test_what_the_newest_step_does_not_say_is_not_shown() -> None:
    found = values(("metrics", 1, STEP), ("metrics", 2, {"left_out": 1}))
    assert ("loss",) not in found
    assert found["step",] == 2


def test_a_loss_that_is_no_number_is_shown_as_such() -> None:
    """The store keeps NaN as null."""
    assert math.isnan(values(("metrics", 1, {"loss": None}))["loss",])


@pytest.mark.parametrize("wrong", ["1.0", [1.0], {}, None])
def test_what_is_no_number_is_left_out(wrong: object) -> None:
    assert ("step",) not in values(("progress", None, {"step": wrong}))
    assert ("tokens_per_second",) not in values(("metrics", None, {"seconds_update": wrong}))


def test_h06_a_checkpoint_counts_when_it_is_published() -> None:
    saved = {"step": 20, "seconds": 4.0, "stall_seconds": 0.5, "bytes": 1000}
    found = values(("metrics", 20, STEP), ("checkpoint", 20, saved))
    assert found["checkpoint_step",] == 20
    assert found["checkpoint_seconds",] == 4.0
    assert found["checkpoint_stall_seconds",] == 0.5
    assert found["checkpoint_timestamp_seconds",] == 1.0


def test_missed_checkpoints_count_until_one_is_published() -> None:
    missed = ("warning", 20, {"message": "no room", "missed": 2, "tries": 3})
    assert values(("started", None, {"world_size": 2}))["checkpoints_missed",] == 0
    assert values(missed)["checkpoints_missed",] == 2
    assert values(missed, ("warning", 21, {"message": "slow"}))["checkpoints_missed",] == 2
    assert values(missed, ("checkpoint", 30, {"step": 30}))["checkpoints_missed",] == 0


def test_evaluations_are_told_by_their_mode() -> None:
    greedy = {"mode": "greedy", "accuracy": 0.75, "reward_mean": 0.5}
    validation = {"mode": "validation", "loss": 1.5, "items": 10}
    unknown = {"mode": "by the dozen", "accuracy": 1.0}
    found = values(*(("evaluation", 10, data) for data in (greedy, validation, unknown)))
    assert found["evaluation_accuracy", "greedy"] == 0.75
    assert found["evaluation_loss", "validation"] == 1.5
    assert not any("by the dozen" in key for key in found)


def test_the_names_follow_the_label_of_the_metric() -> None:
    readings = JobReadings()
    readings.take("metrics", 0.0, 1, STEP)
    readings.take("evaluation", 1.0, 1, {"mode": "greedy", "accuracy": 1.0})

    def more(metric: Metric) -> int:
        return len(metric.labels) - 3

    assert all(more(reading.metric) == len(reading.labels) for reading in readings)
