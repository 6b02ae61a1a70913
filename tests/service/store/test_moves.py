from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import update

from service.jobs import MOVES, IllegalMove, JobState
from service.spec import Reason
from service.store import Store, tables
from service.store.locked import LockedJob
from tests.service.store.running_jobs import new_job


def test_every_pair_of_states_moves_as_the_table_says(store: Store) -> None:
    job = new_job(store)
    for old, new in product(JobState, JobState):
        with store.database.writing() as connection:
            connection.execute(update(tables.jobs).values(state=old))
        before = store.jobs.get(job.id)
        with store.database.writing() as connection:
            locked = LockedJob(connection, job.id)
            if new in MOVES[old]:
                locked.move(new, reason=Reason.USER_ERROR, message="because")
            else:
                with pytest.raises(IllegalMove, match=f"{old} and cannot become {new}"):
                    locked.move(new)
        after = store.jobs.get(job.id)
        if new not in MOVES[old]:
            assert after == before
            continue
        assert (after.state, after.reason, after.message) == (new, Reason.USER_ERROR, "because")
        (event,) = store.events.after(job.id, before.event_count, limit=10)
        assert event.kind == "state"
        assert event.data == {
            "from": old,
            "to": new,
            "reason": "USER_ERROR",
            "message": "because",
        }


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(wanted=st.lists(st.sampled_from(JobState), max_size=25))
def test_g17_no_sequence_of_moves_leads_out_of_a_terminal_state(
    store: Store, wanted: list[JobState]
) -> None:
    job = new_job(store)
    path = [JobState.PENDING]
    for state in wanted:
        with store.database.writing() as connection:
            locked = LockedJob(connection, job.id)
            if state in MOVES[path[-1]]:
                locked.move(state)
                path.append(state)
            else:
                with pytest.raises(IllegalMove):
                    locked.move(state)
    assert store.jobs.get(job.id).state is path[-1]
    assert not any(state.terminal for state in path[:-1])
    log = store.events.after(job.id, 0, limit=100)
    assert [event.number for event in log] == list(range(1, len(path)))
    assert [event.data["to"] for event in log] == path[1:]
