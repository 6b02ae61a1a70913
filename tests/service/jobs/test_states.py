import re
from itertools import product
from pathlib import Path

import pytest

from service.jobs import MOVES, AttemptState, IllegalMove, JobState, Wish, check_move
from service.jobs.states import TERMINAL
from service.spec import Reason

DOCUMENT = Path(__file__).parents[3] / "docs" / "jobs.md"


@pytest.mark.parametrize(("old", "new"), list(product(JobState, JobState)))
def test_a_move_is_legal_exactly_where_the_table_holds_it(old: JobState, new: JobState) -> None:
    if new in MOVES[old]:
        check_move("job-1", old, new)
    else:
        with pytest.raises(IllegalMove, match=f"job-1 is {old} and cannot become {new}") as caught:
            check_move("job-1", old, new)
        assert ("terminal" in str(caught.value)) == old.terminal


def test_g17_exactly_three_states_are_final() -> None:
    assert {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED} == TERMINAL
    assert {state for state in JobState if state.terminal} == TERMINAL
    assert not any(state.holds_place for state in TERMINAL)


def test_every_state_can_be_reached_and_left_for_an_end() -> None:
    def reachable(begin: JobState) -> set[JobState]:
        found, waiting = {begin}, [begin]
        while waiting:
            for state in MOVES[waiting.pop()] - found:
                found.add(state)
                waiting.append(state)
        return found

    assert reachable(JobState.PENDING) == set(JobState)
    for state in JobState:
        assert reachable(state) & TERMINAL


def test_the_document_names_every_state_reason_and_move() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for word in (*JobState, *AttemptState, *Reason, *Wish):
        assert f"`{word}`" in text, word
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", text, flags=re.MULTILINE)
    documented = {state: set(re.findall(r"`(\w+)`", moves)) for state, moves in rows}
    for state in JobState:
        assert documented[state] == {str(move) for move in MOVES[state]}, state
