"""The forms of SLURM's answers: 22.05's as a real one printed it, the others as documented."""

import json
from pathlib import Path
from typing import Any

import pytest

from service.launchers.slurm.answers import (
    SlurmJob,
    UnreadableAnswer,
    parse_sacct,
    parse_scontrol,
    parse_squeue,
)

ANSWERS = Path(__file__).with_name("answers")


def answer(**job: Any) -> str:
    return json.dumps({"meta": {}, "errors": [], "jobs": [job]})


def number(value: int) -> dict[str, Any]:
    return {"set": True, "infinite": False, "number": value}


UNSET = {"set": False, "infinite": False, "number": 0}
COMMON = {"job_id": 7, "name": "planish-job-a-1", "requeue": True, "state_reason": "None"}
EXPECTED = SlurmJob(
    id=7,
    name="planish-job-a-1",
    state=["FAILED"],
    why="None",
    restarts=2,
    requeue=True,
    exit_code=3,
    started=1700000000,
)

BY_RELEASE = {
    "22.05": {
        "job_state": "FAILED",
        "restart_cnt": 2,
        "exit_code": 768,
        "start_time": 1700000000,
    },
    "23.02": {
        "job_state": "FAILED",
        "restart_cnt": 2,
        "exit_code": {"status": "ERROR", "return_code": 3},
        "start_time": 1700000000,
    },
    "23.11": {
        "job_state": ["FAILED"],
        "restart_cnt": 2,
        "exit_code": {
            "status": ["ERROR"],
            "return_code": number(3),
            "signal": {"signal_id": UNSET, "name": ""},
        },
        "start_time": number(1700000000),
    },
    "24.05": {
        "job_state": ["FAILED"],
        "restart_cnt": 2,
        "exit_code": {
            "status": ["ERROR"],
            "return_code": number(3),
            "signal": {"id": UNSET, "name": ""},
        },
        "start_time": number(1700000000),
    },
    "25.05": {
        "job_state": ["FAILED"],
        "restart_cnt": number(2),
        "exit_code": {
            "status": ["ERROR"],
            "return_code": number(3),
            "signal": {"id": UNSET, "name": ""},
        },
        "start_time": number(1700000000),
    },
}


@pytest.mark.parametrize("release", BY_RELEASE)
def test_squeue_of_each_release_says_the_same(release: str) -> None:
    (job,) = parse_squeue(answer(**COMMON, **BY_RELEASE[release]))
    state = job.state if isinstance(job.state, list) else [job.state]
    assert state == ["FAILED"]
    assert job == SlurmJob(
        **{name: getattr(EXPECTED, name) for name in SlurmJob.__slots__ if name != "state"},
        state=job.state,
    )
    assert str(job) == "SLURM job 7 is FAILED"


@pytest.mark.parametrize(
    "exit_code",
    [
        9,
        {"status": ["SIGNALED"], "return_code": UNSET, "signal": {"id": number(9), "name": "KILL"}},
        {"status": "SIGNALED", "return_code": 0, "signal": {"signal_id": 9, "name": "KILL"}},
    ],
)
def test_a_signal_that_ended_a_job(exit_code: object) -> None:
    (job,) = parse_squeue(answer(**COMMON, job_state="FAILED", exit_code=exit_code))
    assert (job.exit_code, job.exit_signal) == (None, 9)


def test_numbers_that_are_not_set() -> None:
    told = {"restart_cnt": None, "exit_code": None, "start_time": UNSET}
    (job,) = parse_squeue(answer(**COMMON, job_state=["PENDING"], **told))
    assert (job.restarts, job.exit_code, job.exit_signal, job.started) == (0, None, None, 0)


def test_the_answer_of_a_real_22_05() -> None:
    jobs = parse_squeue((ANSWERS / "squeue-22.05.json").read_text())
    by_state = {str(job.state): job for job in jobs}
    assert by_state["RUNNING"].requeue
    assert by_state["COMPLETED"].exit_code == 0
    assert by_state["FAILED"].exit_code == 3
    assert by_state["PENDING"].restarts == 1
    assert by_state["PENDING"].why == "BeginTime"
    assert all(job.name.startswith("planish-") for job in jobs)


def test_an_answer_without_jobs_because_slurmctld_is_away_is_none() -> None:
    """As 22.05 prints it, with exit code 0."""
    errors = [
        {
            "description": "Failed while looking for jobs",
            "error_number": -1,
            "error": "Unspecified error",
            "source": "slurm_load_jobs",
        }
    ]
    with pytest.raises(UnreadableAnswer, match="Failed while looking for jobs"):
        parse_squeue(json.dumps({"meta": {}, "errors": errors, "jobs": []}))


def test_g05_accounting_tells_runs_in_order_and_no_steps() -> None:
    def run(state: object, start: object, **more: Any) -> dict[str, Any]:
        shown = {"job_id": 7, "name": "planish-job-a-1", "state": {"current": state}}
        return {**shown, "time": {"start": start}, **more}

    steps = [{"step": {"id": "7.batch"}, "state": "CANCELLED"}]
    jobs = [
        run(["COMPLETED"], number(300), steps=steps, exit_code={"return_code": number(0)}),
        run("PREEMPTED", 100, steps=steps),
        run("NODE_FAIL", 200),
        run("PENDING", 0),
        {**run("RUNNING", 100), "job_id": 8},
    ]
    found = parse_sacct(json.dumps({"jobs": jobs}), 7)
    assert [job.state for job in found] == ["PREEMPTED", "NODE_FAIL", ["COMPLETED"], "PENDING"]
    assert found[-2].exit_code == 0


def test_scontrol_tells_a_job_in_one_line() -> None:
    job = parse_scontrol((ANSWERS / "scontrol-22.05.txt").read_text())
    assert (job.state, job.exit_code, job.exit_signal) == ("FAILED", 3, None)
    assert job.why == "NonZeroExitCode"
    assert job.name.startswith("planish-")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"jobs": 3}', '{"jobs": [3]}', "No jobs"])
def test_what_is_no_answer_is_refused(text: str) -> None:
    for parse in (parse_squeue, parse_scontrol, lambda told: parse_sacct(told, 1)):
        with pytest.raises(UnreadableAnswer):
            parse(text)
