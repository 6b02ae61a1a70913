"""Batches, lengths and schedules at submit; case E09 (sequences cut over ranks)."""

from typing import Any

import pytest

from service.spec.layout import Layout
from service.validation.batch import check_batch, check_cuts, check_lengths, check_schedule
from tests.service.validation.jobs import model, spec


@pytest.mark.parametrize(
    ("training", "layout", "online", "says", "fix"),
    [
        ({"global_batch_size": 7}, Layout(dp=2), False, "dp = 2", "as 8"),
        ({"global_batch_size": 8, "micro_batch_size": 3}, Layout(dp=2), False, "2 x 3", "as 12"),
        (
            {"global_batch_size": 12, "micro_batch_size": 2},
            Layout(dp=2, pp=2, vpp=2),
            False,
            "3 micro-batches on each rank are no multiple of pp = 2",
            "as 16",
        ),
        ({"global_batch_size": 12, "steps": 1}, Layout(dp=2), True, "group size 8", "as 16"),
    ],
)
def test_batches_that_do_not_divide_are_refused(
    training: dict[str, Any], layout: Layout, online: bool, says: str, fix: str
) -> None:
    (problem,) = check_batch(spec(training=training, online=online), layout)
    assert problem.field == "training.global_batch_size"
    assert says in problem.message
    assert problem.fix is not None
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("training", "layout"),
    [
        ({"global_batch_size": 24, "micro_batch_size": 4, "steps": 1}, Layout(dp=3)),
        ({"global_batch_size": 24, "micro_batch_size": 4, "steps": 1}, Layout(dp=2, pp=2)),
        ({"global_batch_size": 24, "micro_batch_size": 4, "steps": 1}, Layout(dp=3, pp=2, vpp=2)),
        ({"global_batch_size": 24, "steps": 1}, Layout(dp=2, pp=4, vpp=2)),
    ],
)
def test_batches_that_divide_are_accepted(training: dict[str, Any], layout: Layout) -> None:
    assert check_batch(spec(training=training, online=True), layout) == []


PAIRS: dict[str, Any] = {"algorithm": {"type": "dpo"}}


@pytest.mark.parametrize(
    ("parts", "training", "layout", "field", "says", "fix"),
    [
        (
            {"algorithm": {"type": "grpo", "group_size": 4, "mini_batches": 5}},
            {"global_batch_size": 24, "steps": 1},
            Layout(),
            "algorithm.mini_batches",
            "24 rows are no multiple of the 5 optimizer steps",
            "it can be 1, 2, 3, 4, 6, 8, 12, 24",
        ),
        (
            {"algorithm": {"type": "grpo", "group_size": 4, "mini_batches": 4}},
            {"global_batch_size": 24, "steps": 1},
            Layout(dp=4),
            "training.global_batch_size",
            "6 sequences of each of 4 mini-batches do not divide over dp = 4",
            "as 32",
        ),
        (
            {"algorithm": {"type": "ppo", "mini_batches": 2}},
            {"global_batch_size": 24, "steps": 1, "micro_batch_size": 8},
            Layout(),
            "training.global_batch_size",
            "12 sequences of each of 2 mini-batches are no multiple of dp x micro_batch_size",
            "as 32",
        ),
        (
            PAIRS,
            {"global_batch_size": 6},
            Layout(dp=4),
            "training.global_batch_size",
            "6 pairs",
            "8",
        ),
        (
            PAIRS,
            {"global_batch_size": 6, "micro_batch_size": 3},
            Layout(),
            "training.micro_batch_size",
            "no whole number of pairs",
            "as 4",
        ),
        (
            PAIRS,
            {"global_batch_size": 6, "micro_batch_size": 8},
            Layout(),
            "training.global_batch_size",
            "1 x 8 / 2 = 4",
            "as 8",
        ),
        (
            {"algorithm": {"type": "kto"}},
            {"global_batch_size": 1},
            Layout(),
            "training.global_batch_size",
            "kto compares the rows of a batch, and needs at least 2",
            "at least 2",
        ),
    ],
)
def test_a22_mini_batches_and_pairs_divide_and_kto_has_rows_to_compare(
    parts: dict[str, Any],
    training: dict[str, Any],
    layout: Layout,
    field: str,
    says: str,
    fix: str,
) -> None:
    online = "steps" in training
    (problem,) = check_batch(spec(online=online, training=training, **parts), layout)
    assert problem.field == field
    assert says in problem.message
    assert fix in str(problem.fix)


@pytest.mark.parametrize(
    ("parts", "training", "layout"),
    [
        (
            {"algorithm": {"type": "grpo", "group_size": 4, "mini_batches": 3}},
            {"global_batch_size": 24, "steps": 1, "micro_batch_size": 4},
            Layout(dp=2),
        ),
        (PAIRS, {"global_batch_size": 6, "micro_batch_size": 4}, Layout(dp=3)),
        (PAIRS, {"global_batch_size": 1}, Layout()),
        ({"algorithm": {"type": "kto"}}, {"global_batch_size": 2}, Layout(dp=2)),
    ],
)
def test_mini_batches_and_pairs_that_divide_are_accepted(
    parts: dict[str, Any], training: dict[str, Any], layout: Layout
) -> None:
    online = "steps" in training
    assert check_batch(spec(online=online, training=training, **parts), layout) == []


def test_a_sequence_longer_than_the_model_is_refused() -> None:
    (problem,) = check_lengths(spec(training={"max_length": 513}), model())
    assert (problem.field, problem.fix) == ("training.max_length", "use at most 512")
    assert check_lengths(spec(training={"max_length": 512}), model()) == []


def test_new_tokens_must_leave_room_for_the_question() -> None:
    training = {"max_length": 64, "steps": 1}
    too_many = spec(training=training, rollout={"max_new_tokens": 64}, online=True)
    (problem,) = check_lengths(too_many, model())
    assert problem.field == "rollout.max_new_tokens"
    assert problem.fix == "use less than 64, or a larger max_length"
    assert check_lengths(spec(training=training, rollout={"max_new_tokens": 64}), model()) == []


@pytest.mark.parametrize(
    ("layout", "least"),
    [
        (Layout(cp=2), 4),
        (Layout(tp=4, sequence_parallel=True), 4),
        (Layout(tp=3, cp=2, sequence_parallel=True), 12),
    ],
)
def test_e09_sequences_shorter_than_a_piece_for_each_rank_are_refused(
    layout: Layout, least: int
) -> None:
    (problem,) = check_cuts(spec(training={"max_length": least - 1}), layout)
    assert problem.field == "training.max_length"
    assert f"fewer than the {least}" in problem.message
    assert problem.fix == f"use at least {least}, or a lower cp or tp"
    assert check_cuts(spec(training={"max_length": least + 1}), layout) == []
    assert check_cuts(spec(training={"max_length": 2}), Layout(tp=4)) == []


def test_a_warm_up_longer_than_the_job_is_refused() -> None:
    (problem,) = check_schedule(spec(training={"steps": 5}, optimizer={"warmup_steps": 6}))
    assert (problem.field, problem.fix) == ("optimizer.warmup_steps", "use at most 5")
    assert check_schedule(spec(optimizer={"warmup_steps": 6})) == []


def test_the_policy_learns_before_the_job_ends() -> None:
    def problems(warmup: int) -> list[str]:
        algorithm = {"type": "ppo", "value_model": {"warmup_steps": warmup}}
        asked = spec(online=True, algorithm=algorithm, training={"steps": 10})
        return [problem.field for problem in check_schedule(asked)]

    assert problems(10) == ["algorithm.value_model.warmup_steps"]
    assert problems(9) == []
