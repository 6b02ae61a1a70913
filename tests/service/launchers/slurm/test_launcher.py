from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.launchers import LaunchError, LauncherUnavailable, LaunchRequest, Phase
from service.launchers.slurm.files import AttemptFiles
from service.launchers.slurm.launcher import SlurmLauncher
from service.spec import JobSpec, Reason
from tests.service.launchers.slurm.scripted import FIRST, SECOND, ScriptedSlurm, launcher_of
from tests.service.store.sample_jobs import document


def test_g01_a_preempted_job_is_the_next_attempt_of_the_same_job(
    slurm: ScriptedSlurm, launcher: SlurmLauncher, request_: LaunchRequest
) -> None:
    assert launcher.poll(FIRST).phase is Phase.UNKNOWN
    launcher.submit(request_)
    assert launcher.poll(FIRST).phase is Phase.QUEUED
    slurm.set(101, "RUNNING")
    assert launcher.poll(FIRST).phase is Phase.RUNNING
    slurm.set(101, "PREEMPTED")
    assert launcher.poll(FIRST).phase is Phase.RUNNING  # SLURM may queue it again
    slurm.set(101, "COMPLETING", restart_cnt=1)
    assert launcher.poll(FIRST).phase is Phase.RUNNING  # its processes are being ended
    slurm.set(101, "PENDING", restart_cnt=1)
    log = request_.job_dir / "attempts/1/log"
    log.write_text(
        "slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026 DUE TO PREEMPTION ***\n"
    )
    ended = launcher.poll(FIRST)
    assert (ended.phase, ended.reason) == (Phase.EXITED, Reason.PREEMPTED)
    assert "101" in ended.evidence
    assert launcher.poll(SECOND).phase is Phase.UNKNOWN
    launcher.submit(replace(request_, attempt=2))
    assert launcher.poll(SECOND).phase is Phase.QUEUED
    slurm.set(101, "RUNNING")
    assert launcher.poll(SECOND).phase is Phase.RUNNING
    slurm.set(101, "COMPLETED")
    ended = launcher.poll(SECOND)
    assert (ended.phase, ended.reason, ended.exit_code) == (Phase.EXITED, None, 0)
    assert launcher.poll(FIRST).reason is Reason.PREEMPTED
    assert len(slurm.submitted) == 1


def test_a_preempted_job_that_is_not_queued_again_has_ended(
    slurm: ScriptedSlurm, tmp_path: Path, request_: LaunchRequest
) -> None:
    patient, hasty = launcher_of(slurm, tmp_path), launcher_of(slurm, tmp_path, requeue_seconds=0)
    patient.submit(request_)
    slurm.set(101, ["PREEMPTED"], requeue=True)
    assert patient.poll(FIRST).phase is Phase.RUNNING
    assert hasty.poll(FIRST).reason is Reason.PREEMPTED
    slurm.set(101, ["NODE_FAIL"], requeue=False)
    assert patient.poll(FIRST).reason is Reason.NODE_FAILURE
    # The next attempt is a job of its own.
    patient.submit(replace(request_, attempt=2))
    assert len(slurm.submitted) == 2
    assert patient.poll(SECOND).phase is Phase.QUEUED


def test_g03_an_unknown_state_concludes_nothing(
    slurm: ScriptedSlurm,
    launcher: SlurmLauncher,
    request_: LaunchRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    launcher.submit(request_)
    slurm.set(101, "NEWSTATE")
    with pytest.raises(LauncherUnavailable, match="NEWSTATE"):
        launcher.poll(FIRST)
    assert "NEWSTATE" in caplog.text
    slurm.set(101, ["OUT_OF_MEMORY"])
    assert launcher.poll(FIRST).reason is Reason.OUT_OF_MEMORY


def test_a_submission_whose_answer_was_lost_is_found_by_its_name(
    slurm: ScriptedSlurm, launcher: SlurmLauncher, request_: LaunchRequest
) -> None:
    slurm.lose_answer = True
    with pytest.raises(LauncherUnavailable):
        launcher.submit(request_)
    slurm.lose_answer = False
    launcher.submit(request_)
    assert len(slurm.submitted) == 1
    assert launcher.poll(FIRST).phase is Phase.QUEUED


def test_a_script_that_took_the_attempt_is_found_when_slurm_has_forgotten_it(
    slurm: ScriptedSlurm, launcher: SlurmLauncher, request_: LaunchRequest
) -> None:
    folder = request_.job_dir / "attempts/1"
    folder.mkdir(parents=True)
    (folder / "slurm_job").write_text("55 1\n")
    (folder / "slurm_exit").write_text("3\n")
    launcher.submit(request_)
    assert slurm.submitted == []
    seen = launcher.poll(FIRST)
    assert (seen.phase, seen.exit_code, seen.reason) == (Phase.EXITED, 3, None)
    assert "knows its job 55 no more" in seen.evidence


def test_of_two_jobs_the_one_that_took_the_attempt_is_followed(
    slurm: ScriptedSlurm, launcher: SlurmLauncher, request_: LaunchRequest
) -> None:
    """sbatch on a login node may have taken a job after all when its answer was lost."""
    launcher.submit(request_)
    slurm.jobs[102] = slurm.jobs[101] | {"job_id": 102, "job_state": "RUNNING"}
    slurm.set(101, "COMPLETED")  # it left the attempt to the other
    (request_.job_dir / "attempts/1/slurm_job").write_text("102 1\n")
    assert launcher.poll(FIRST).phase is Phase.RUNNING
    launcher.cancel(FIRST, 0.0)
    assert slurm.cancelled[0][-1] == "102"


def test_accounting_tells_of_what_slurmctld_has_forgotten(
    slurm: ScriptedSlurm, launcher: SlurmLauncher, request_: LaunchRequest
) -> None:
    launcher.submit(request_)
    slurm.jobs.clear()
    common = {"job_id": 101, "name": FIRST}
    slurm.accounting = [{**common, "state": {"current": ["TIMEOUT"]}, "time": {"start": 1}}]
    assert launcher.poll(FIRST).reason is Reason.TIMEOUT
    # An older cluster's job of the same number is another one.
    slurm.accounting[0]["name"] = "other"
    assert launcher.poll(FIRST).reason is None


def test_while_slurmctld_is_away_nothing_is_known(
    slurm: ScriptedSlurm, launcher: SlurmLauncher, request_: LaunchRequest
) -> None:
    launcher.submit(request_)
    slurm.away = True
    for call in (
        lambda: launcher.poll(FIRST),
        lambda: launcher.cancel(FIRST, 0.0),
        lambda: launcher.submit(replace(request_, attempt=2)),
    ):
        with pytest.raises(LauncherUnavailable, match="Unable to contact"):
            call()
    slurm.away = False
    assert launcher.poll(FIRST).phase is Phase.QUEUED


def test_what_slurm_does_not_take_is_told_in_its_words(
    slurm: ScriptedSlurm, launcher: SlurmLauncher, request_: LaunchRequest
) -> None:
    slurm.refuse = "Batch job submission failed: Invalid partition name specified"
    with pytest.raises(LaunchError, match="Invalid partition name"):
        launcher.submit(request_)
    slurm.refuse = "Batch job submission failed: Socket timed out on send/recv operation"
    with pytest.raises(LauncherUnavailable, match="Socket timed out"):
        launcher.submit(request_)
    assert launcher.poll(FIRST).phase is Phase.UNKNOWN


def test_a_job_that_another_cluster_took_is_not_started(
    slurm: ScriptedSlurm, launcher: SlurmLauncher, request_: LaunchRequest
) -> None:
    slurm.elsewhere = "other"
    with pytest.raises(LaunchError, match=r"the cluster 'other', as its job 101.*SBATCH_CLUSTERS"):
        launcher.submit(request_)
    assert launcher.poll(FIRST).phase is Phase.UNKNOWN


def test_a_dependency_that_failed_is_the_users_matter(
    slurm: ScriptedSlurm, launcher: SlurmLauncher, request_: LaunchRequest
) -> None:
    launcher.submit(request_)
    slurm.set(101, ["CANCELLED"], state_reason="DependencyNeverSatisfied")
    seen = launcher.poll(FIRST)
    assert seen.reason is Reason.USER_ERROR
    assert "resources.slurm.after" in seen.evidence
    slurm.set(101, ["CANCELLED"], state_reason="None")
    assert launcher.poll(FIRST).reason is Reason.CANCELLED


def test_memory_is_told_by_the_log_where_the_state_does_not(
    slurm: ScriptedSlurm, launcher: SlurmLauncher, request_: LaunchRequest
) -> None:
    launcher.submit(request_)
    log = request_.job_dir / "attempts/1/log"
    log.write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=101.0\n")
    slurm.set(101, "FAILED", exit_code=9)
    assert launcher.poll(FIRST).reason is Reason.OUT_OF_MEMORY
    slurm.set(101, "COMPLETED", exit_code=0)
    assert launcher.poll(FIRST).reason is None


def test_another_process_that_submits_is_waited_for(
    slurm: ScriptedSlurm, launcher: SlurmLauncher, request_: LaunchRequest
) -> None:
    files = AttemptFiles(request_.job_dir, 1)
    files.make()
    with files.locked(), pytest.raises(LauncherUnavailable, match="just being submitted"):
        launcher.submit(request_)
    launcher.submit(request_)
    assert len(slurm.submitted) == 1


@pytest.mark.parametrize("damage", ["", "{", '{"slurm_id": "x"}', "[]"])
def test_a_damaged_record_concludes_nothing(
    launcher: SlurmLauncher, request_: LaunchRequest, damage: str
) -> None:
    launcher.submit(request_)
    (request_.job_dir / "attempts/1/slurm.json").write_text(damage)
    with pytest.raises(LauncherUnavailable, match="damaged"):
        launcher.poll(FIRST)


def test_the_preview_is_the_script(
    slurm: ScriptedSlurm, launcher: SlurmLauncher, request_: LaunchRequest
) -> None:
    shown = launcher.preview(request_)
    launcher.submit(request_)
    assert shown is not None
    assert (shown.kind, shown.text) == ("sbatch", slurm.submitted[0])
    assert (request_.job_dir / "attempts/1/job.sbatch").read_text() == shown.text


def test_parts_of_other_clusters_are_refused(launcher: SlurmLauncher) -> None:
    def spec(**parts: Any) -> JobSpec:
        return JobSpec.model_validate(document(resources={"cluster": "slurm", **parts}))

    assert launcher.check(spec(slurm={"partition": "gpu"})) == []
    (problem,) = launcher.check(spec(kubernetes={}))
    assert problem.field == "resources.kubernetes"
