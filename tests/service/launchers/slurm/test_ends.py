import pytest

from service.launchers.slurm.answers import SlurmJob
from service.launchers.slurm.ends import ran_out_of_memory, why_queued_again
from service.spec import Reason

STEP = "slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-30T09:22:09 DUE TO {} ***\n"


def run(state: str) -> SlurmJob:
    return SlurmJob(id=1, name="planish-job-a-1", state=state)


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("PREEMPTION", Reason.PREEMPTED),
        ("NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", Reason.NODE_FAILURE),
        ("JOB REQUEUE", Reason.PREEMPTED),
        ("TIME LIMIT", Reason.TIMEOUT),
    ],
)
def test_slurms_own_words_tell_why_a_job_was_queued_again(cause: str, reason: Reason) -> None:
    log = "training\n" + STEP.format(cause) + "srun: forcing job termination\n"
    assert why_queued_again(0, [], log) is reason


def test_a_machine_that_is_gone_says_nothing() -> None:
    assert why_queued_again(0, [], "training\n") is Reason.NODE_FAILURE
    quoted = "a sample that says CANCELLED AT noon DUE TO PREEMPTION\n"
    assert why_queued_again(0, [], quoted) is Reason.NODE_FAILURE


def test_accounting_knows_it_best() -> None:
    runs = [run("PREEMPTED"), run("NODE_FAIL"), run("RUNNING")]
    log = STEP.format("NODE FAILURE")
    assert why_queued_again(0, runs, log) is Reason.PREEMPTED
    assert why_queued_again(1, runs, "") is Reason.NODE_FAILURE
    assert why_queued_again(2, runs, STEP.format("PREEMPTION")) is Reason.PREEMPTED
    assert why_queued_again(0, [run("NEWSTATE")], "") is Reason.NODE_FAILURE


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd-n1: error: StepId=7.0 exceeded memory limit (300000 > 262144), being killed",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have "
        "been OOM Killed.",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.batch",
        "srun: error: n1: task 0: Out Of Memory",
    ],
)
def test_slurms_words_for_too_much_memory(line: str) -> None:
    assert ran_out_of_memory(f"step 3\n{line}\n")
    assert not ran_out_of_memory(f"step 3 of a chat about: {line}\n")
