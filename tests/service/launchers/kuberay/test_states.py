import logging

import pytest

from service.launchers import LauncherUnavailable, Phase
from service.launchers.kuberay.states import OVER, STAGES, RayJobStatus, Stage
from service.spec import Reason
from tests.service.launchers.kuberay.attempts import rayjob


def test_g13_every_word_of_the_operator_has_a_stage() -> None:
    for word, stage in STAGES.items():
        assert RayJobStatus.of(rayjob(word)).stage is stage
    assert RayJobStatus.of({"metadata": {"name": "x"}}).stage is Stage.NEW


def test_an_unknown_word_is_told_and_nothing_is_concluded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(LauncherUnavailable, match="Melting"):
        RayJobStatus.of(rayjob("Melting"))
    assert "Melting" in caplog.text
    strange = RayJobStatus.of(rayjob("Complete", jobStatus="VANISHED"))
    with pytest.raises(LauncherUnavailable, match="VANISHED"):
        strange.end("rayjob")


@pytest.mark.parametrize(
    ("status", "code", "signal", "reason"),
    [
        ({"word": "Complete", "jobStatus": "SUCCEEDED"}, 0, None, None),
        ({"word": "Complete", "jobStatus": "FAILED", "message": "exit code 3"}, 3, None, None),
        ({"word": "Complete", "jobStatus": "STOPPED"}, None, None, Reason.PREEMPTED),
        (
            {"word": "Failed", "reason": "AppFailed", "message": "failed with exit code 5, last"},
            *(5, None, None),
        ),
        ({"word": "Failed", "reason": "AppFailed", "message": "exit code 137"}, None, 9, None),
        ({"word": "Failed", "reason": "AppFailed", "message": "exit code -15"}, None, 15, None),
        ({"word": "Failed", "reason": "AppFailed", "jobStatus": "Failure"}, None, None, None),
        # Ray's own watch over memory ended the actor that holds the driver.
        (
            {
                "word": "Failed",
                "reason": "AppFailed",
                "message": "The actor died. 1 worker(s) were killed due to the node running low on "
                "memory. Memory on the node (IP: 10.0.0.1, ID: 9c28) was 1.92GB used / 2.00GB "
                "limit (0.959295)",
            },
            *(None, None, Reason.OUT_OF_MEMORY),
        ),
        # The same words where they are quoted from the log, and not Ray's about the job.
        (
            {
                "word": "Failed",
                "reason": "AppFailed",
                "message": "exit code 1\n1 worker(s) were killed due to the node running low on "
                "memory",
            },
            *(1, None, None),
        ),
        # The operator's own deadline: Ray still says that the job runs.
        (
            {"word": "Failed", "reason": "DeadlineExceeded", "jobStatus": "RUNNING"},
            *(None, None, Reason.TIMEOUT),
        ),
        ({"word": "Failed", "reason": "SubmissionFailed"}, None, None, Reason.LAUNCH_FAILED),
        ({"word": "Failed", "reason": "SomethingNew"}, None, None, None),
        ({"word": "ValidationFailed", "message": "name"}, None, None, Reason.LAUNCH_FAILED),
    ],
)
def test_how_a_rayjob_ended(
    status: dict[str, str], code: int | None, signal: int | None, reason: Reason | None
) -> None:
    seen = RayJobStatus.of(rayjob(**status)).end("rayjob")
    assert (seen.phase, seen.exit_code, seen.exit_signal, seen.reason) == (
        *(Phase.EXITED, code, signal, reason),
    )
    assert seen.evidence


def test_only_three_stages_are_the_end() -> None:
    assert {Stage.COMPLETE, Stage.FAILED, Stage.INVALID} == OVER
