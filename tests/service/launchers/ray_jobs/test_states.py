import logging
from typing import Any

import pytest

from service.launchers import LauncherUnavailable, Observation, Phase
from service.launchers.ray_jobs.states import REASON_OF_ERROR, observe
from service.spec import Reason


def seen(**record: Any) -> Observation:
    return observe({"submission_id": "planish-job-1", **record})


@pytest.mark.parametrize(
    ("status", "phase", "reason", "code"),
    [
        ("PENDING", Phase.QUEUED, None, None),
        ("RUNNING", Phase.RUNNING, None, None),
        ("SUCCEEDED", Phase.EXITED, None, 0),
        ("STOPPED", Phase.EXITED, Reason.PREEMPTED, None),
    ],
)
def test_every_state_of_ray_has_a_meaning(
    status: str, phase: Phase, reason: Reason | None, code: int | None
) -> None:
    found = seen(status=status)
    assert (found.phase, found.reason, found.exit_code) == (phase, reason, code)
    assert status in found.evidence


@pytest.mark.parametrize("word", ["NEWSTATE", "", "succeeded", "STOPPED "])
def test_g03_an_unknown_word_is_no_end_and_no_success(
    word: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(LauncherUnavailable, match="unknown word"), caplog.at_level(logging.ERROR):
        seen(status=word)
    assert "no known state" in caplog.text


@pytest.mark.parametrize(
    ("code", "exit_code", "exit_signal"), [(5, 5, None), (-9, None, 9), (None, None, None)]
)
def test_a_drivers_own_exit_is_left_to_the_driver(
    code: int | None, exit_code: int | None, exit_signal: int | None
) -> None:
    found = seen(status="FAILED", error_type="JOB_ENTRYPOINT_COMMAND_ERROR", driver_exit_code=code)
    assert (found.phase, found.reason) == (Phase.EXITED, None)
    assert (found.exit_code, found.exit_signal) == (exit_code, exit_signal)


def test_what_ray_could_not_start_and_what_it_lost() -> None:
    for error, reason in REASON_OF_ERROR.items():
        found = seen(status="FAILED", error_type=error, message="why")
        assert (found.phase, found.reason) == (Phase.EXITED, reason)
        assert f"{error}, why" in found.evidence
    assert REASON_OF_ERROR["RUNTIME_ENV_SETUP_FAILURE"] is Reason.LAUNCH_FAILED
    assert REASON_OF_ERROR["JOB_SUPERVISOR_ACTOR_DIED"] is Reason.NODE_FAILURE


def test_an_actor_that_ray_ended_for_want_of_memory_is_no_lost_machine() -> None:
    message = "Memory on the node (IP: 10.0.0.1, ID: 9c28) was 1.92GB used / 2.00GB limit (0.95)"
    found = seen(status="FAILED", error_type="JOB_SUPERVISOR_ACTOR_DIED", message=message)
    assert found.reason is Reason.OUT_OF_MEMORY


def test_the_table_has_every_error_that_this_ray_knows() -> None:
    from ray.dashboard.modules.job.common import JobErrorType

    assert {error.value for error in JobErrorType} == set(REASON_OF_ERROR)


def test_an_unknown_error_is_a_failure_without_a_reason_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = seen(status="FAILED", error_type="JOB_NEW_ERROR")
    assert (found.phase, found.reason) == (Phase.EXITED, None)
    assert "JOB_NEW_ERROR" in caplog.text


def test_a_folder_that_is_not_shared_is_told_in_words() -> None:
    found = seen(status="FAILED", error_type="JOB_ENTRYPOINT_COMMAND_ERROR", driver_exit_code=78)
    assert found.reason is Reason.LAUNCH_FAILED
    assert "same path" in found.evidence
