"""Reads what squeue, scontrol and sacct print about jobs, in the forms of SLURM 22.05 to 25.x.

The JSON of squeue and sacct has a version of its own (v0.0.38 in 22.05, .39 in 23.02, .40 in 23.11,
.41 in 24.05, .42 and .43 after it), and each one moved something: a state was a word and became a
list, a number was a number and became `{"set": true, "infinite": false, "number": 5}`, an exit code
was a wait status and became an object. All forms are read, whatever version is claimed.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class UnreadableAnswer(ValueError):
    """A command of SLURM printed something that is no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """One job, or in accounting one run of it."""

    id: int
    name: str
    state: object
    """As it was told; see `service.launchers.slurm.states`."""
    why: str = ""
    """SLURM's word for why it waits or has ended, as `Priority` or `NonZeroExitCode`."""
    restarts: int = 0
    """How often it was queued again."""
    requeue: bool = False
    """Whether SLURM may queue it again."""
    exit_code: int | None = None
    exit_signal: int | None = None
    """Signal that ended it."""
    started: int = 0
    """Seconds since the epoch; 0 where it was never."""

    def __str__(self) -> str:
        state = "+".join(map(str, self.state)) if isinstance(self.state, list) else self.state
        why = f" ({self.why})" if self.why and self.why != "None" else ""
        return f"SLURM job {self.id} is {state}{why}"


def parse_squeue(text: str) -> list[SlurmJob]:
    """The jobs in the answer of `squeue --json`.

    Raises:
        UnreadableAnswer: it is none.
    """
    return [_queued(job) for job in _jobs(text, "squeue")]


def parse_sacct(text: str, job_id: int) -> list[SlurmJob]:
    """The runs of one job in the answer of `sacct --json --duplicates`, in order; no steps.

    Raises:
        UnreadableAnswer: it is none.
    """
    runs = [_accounted(job) for job in _jobs(text, "sacct")]
    return sorted(  # one that waits for its machines comes after all that had theirs
        (run for run in runs if run.id == job_id), key=lambda run: run.started or math.inf
    )


def parse_scontrol(text: str) -> SlurmJob:
    """The job in the answer of `scontrol --oneliner show job ID`.

    Raises:
        UnreadableAnswer: it is none.
    """
    fields: dict[str, str] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if equals:
            fields.setdefault(name, value)  # a command line at the end may hold anything
    try:
        code, _, ended_by = fields.get("ExitCode", "0:0").partition(":")
        return SlurmJob(
            id=int(fields["JobId"]),
            name=fields["JobName"],
            state=fields["JobState"],
            why=fields.get("Reason", ""),
            restarts=int(fields.get("Restarts", "0")),
            requeue=fields.get("Requeue") == "1",
            exit_code=int(code),
            exit_signal=int(ended_by or "0") or None,
        )
    except (KeyError, ValueError) as error:
        raise UnreadableAnswer(
            f"scontrol printed {text[:500]!r}, which is no job: {error}"
        ) from error


def _jobs(text: str, command: str) -> Sequence[Mapping[str, Any]]:
    try:
        answer = json.loads(text)
        jobs = answer["jobs"]
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableAnswer(f"{command} --json printed {text[:500]!r}: {error}") from error
    if answer.get("errors"):  # with an empty list of jobs, and in 22.05 with exit code 0
        raise UnreadableAnswer(f"{command} --json: {json.dumps(answer['errors'])[:500]}")
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise UnreadableAnswer(f"{command} --json printed `jobs`, which is no list")
    return jobs


def _queued(job: Mapping[str, Any]) -> SlurmJob:
    code, ended_by = _exit(job.get("exit_code"))
    return SlurmJob(
        id=_number(job.get("job_id")),
        name=str(job.get("name") or ""),
        state=job.get("job_state"),
        why=str(job.get("state_reason") or ""),
        restarts=_number(job.get("restart_cnt")),
        requeue=bool(job.get("requeue")),
        exit_code=code,
        exit_signal=ended_by,
        started=_number(job.get("start_time")),
    )


def _accounted(job: Mapping[str, Any]) -> SlurmJob:
    code, ended_by = _exit(job.get("exit_code"))
    state = job.get("state")
    time = job.get("time")
    return SlurmJob(
        id=_number(job.get("job_id")),
        name=str(job.get("name") or ""),
        state=state.get("current") if isinstance(state, dict) else state,
        why=str(state.get("reason") or "") if isinstance(state, dict) else "",
        restarts=_number(job.get("restart_cnt")),
        exit_code=code,
        exit_signal=ended_by,
        started=_number(time.get("start")) if isinstance(time, dict) else 0,
    )


def _number(value: object) -> int:
    """A number in any of its forms; 0 where it is not set or infinite."""
    if isinstance(value, dict):
        if not value.get("set", True) or value.get("infinite"):
            return 0
        value = value.get("number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return int(value)


def _exit(value: object) -> tuple[int | None, int | None]:
    """Exit code and signal; a code of null where a signal ended it or nothing is known."""
    if isinstance(value, dict) and "return_code" in value:
        signal = value.get("signal")
        number = 0
        if isinstance(signal, dict):
            number = _number(signal.get("id", signal.get("signal_id")))
        if number:
            return None, number
        return _number(value["return_code"]), None
    if value is None:
        return None, None
    status = _number(value)  # as wait(2) has it
    return (None, status & 0x7F) if status & 0x7F else (status >> 8, None)
