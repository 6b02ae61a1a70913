"""Lengths that an algorithm names, against how long an episode can be."""

from typing import Any

import pytest

from service.spec import JobSpec
from service.validation.episodes import check_overlong, length_notes, most_policy_tokens
from tests.service.validation.jobs import spec


def job(*, rollout: int = 100, max_length: int = 2048, **algorithm: Any) -> JobSpec:
    return spec(
        online=True,
        algorithm={"type": "grpo", **algorithm},
        rollout={"max_new_tokens": rollout},
        training={"steps": 1, "max_length": max_length},
    )


def overlong(most: int, buffer: int) -> dict[str, Any]:
    return {"overlong": {"max_tokens": most, "buffer_tokens": buffer}}


def test_how_much_the_policy_can_write() -> None:
    assert most_policy_tokens(job(), 1) == 100
    assert most_policy_tokens(job(), 3) == 300
    assert most_policy_tokens(job(max_length=150), 3) == 149
    asked = spec(online=True, environment={"id": "tools/calculator", "max_turns": 2})
    assert most_policy_tokens(asked, 8) == 2 * 256


@pytest.mark.parametrize(
    ("most", "buffer", "turns", "refused", "noted"),
    [
        (100, 20, 1, False, False),
        (120, 20, 1, True, True),  # begins where no episode comes
        (119, 20, 1, False, True),
        (120, 20, 2, False, False),
    ],
)
def test_a_penalty_on_length_can_be_reached(
    most: int, buffer: int, turns: int, refused: bool, noted: bool
) -> None:
    asked = job(**overlong(most, buffer))
    problems = check_overlong(asked, turns)
    assert [p.field for p in problems] == ["algorithm.overlong.max_tokens"] * refused
    assert all(f"at most {100 * turns} of the policy" in p.message for p in problems)
    assert bool(length_notes(asked, turns)) is noted


def test_a_constant_that_is_not_the_longest_episode_is_noted() -> None:
    asked = {"loss_aggregation": "seq-mean-token-sum-norm", "length_constant": 300}
    (note,) = length_notes(job(**asked), 1)
    assert "length_constant is 300, and an episode has at most 100 tokens" in note
    assert length_notes(job(**asked), 3) == []
    assert length_notes(job(), 1) == []
    assert length_notes(spec(), 1) == []
