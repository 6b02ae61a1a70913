from dataclasses import replace

import pytest

from service.launchers import LauncherUnavailable, LaunchRequest, Phase
from service.launchers.slurm.files import AttemptFiles
from service.launchers.slurm.launcher import SlurmLauncher
from tests.service.launchers.slurm.scripted import FIRST, SECOND, ScriptedSlurm


def test_cancelling_tells_the_driver_once_and_then_ends_the_job(
    slurm: ScriptedSlurm, launcher: SlurmLauncher, request_: LaunchRequest
) -> None:
    launcher.submit(request_)
    slurm.set(101, "RUNNING")
    for _ in range(3):
        launcher.cancel(FIRST, 10.0)
    assert slurm.cancelled == [["--batch", "--signal=USR1", f"--name={FIRST}", "101"]]
    launcher.cancel(FIRST, 0.0)
    assert slurm.cancelled[1:] == [[f"--name={FIRST}", "101"]]
    # A run that SLURM starts now sees that it must not.
    assert AttemptFiles(request_.job_dir, 1).cancelled(1)


def test_a_driver_that_could_not_be_told_is_told_again(
    slurm: ScriptedSlurm, launcher: SlurmLauncher, request_: LaunchRequest
) -> None:
    launcher.submit(request_)
    slurm.set(101, "RUNNING")
    slurm.refuse_cancel = "Kill job error: Unable to contact slurm controller (connect failure)"
    with pytest.raises(LauncherUnavailable, match="Unable to contact"):
        launcher.cancel(FIRST, 10.0)
    slurm.refuse_cancel = ""
    launcher.cancel(FIRST, 10.0)
    assert len(slurm.cancelled) == 1


def test_what_was_cancelled_before_its_submission_is_never_submitted(
    slurm: ScriptedSlurm, launcher: SlurmLauncher, request_: LaunchRequest
) -> None:
    launcher.cancel(FIRST, 0.0)
    launcher.submit(request_)
    assert slurm.submitted == []
    assert launcher.poll(FIRST).phase is Phase.EXITED


def test_a_job_that_slurm_queued_again_ends_with_the_attempt_it_would_run(
    slurm: ScriptedSlurm, launcher: SlurmLauncher, request_: LaunchRequest
) -> None:
    launcher.submit(request_)
    slurm.set(101, "RUNNING")
    launcher.cancel(SECOND, 0.0)  # nothing to do with the run that goes on
    assert slurm.cancelled == []
    files = AttemptFiles(request_.job_dir, 2)
    assert (files.cancelled(1), files.cancelled(2)) == (False, True)
    slurm.set(101, "PENDING", restart_cnt=1)
    for _ in range(2):  # an answer of scancel may be lost
        launcher.cancel(SECOND, 0.0)
        assert slurm.cancelled.pop() == [f"--name={FIRST}", "101"]
    assert files.cancelled(1)
    launcher.submit(replace(request_, attempt=2))
    assert len(slurm.submitted) == 1
    assert launcher.poll(SECOND).phase is Phase.EXITED


def test_a_job_that_slurm_queued_again_ends_with_the_attempt_that_ended(
    slurm: ScriptedSlurm, launcher: SlurmLauncher, request_: LaunchRequest
) -> None:
    """A user cancels a job between two attempts."""
    launcher.submit(request_)
    slurm.set(101, "PENDING", restart_cnt=1)
    assert launcher.poll(FIRST).phase is Phase.EXITED
    launcher.cancel(FIRST, 0.0)
    assert slurm.cancelled == [[f"--name={FIRST}", "101"]]
    assert AttemptFiles(request_.job_dir, 1).cancelled(1)
