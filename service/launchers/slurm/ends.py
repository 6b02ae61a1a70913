"""Why a job of SLURM ended or was queued again, where its state does not tell: pure functions.

SLURM forgets why it queued a job again: the job is PENDING, with one more restart, and that is all.
Accounting knows it, where there is one. Otherwise SLURM's own words in the attempt's log do:
slurmstepd writes "DUE TO PREEMPTION" before it kills. A machine that is gone writes nothing.

Memory is the same: without cgroups, and with a driver that lives on after one rank was killed, the
state is FAILED, and only the log says that somebody took too much.
"""

import re
from collections.abc import Sequence

from service.launchers.slurm.answers import SlurmJob
from service.launchers.slurm.states import UnknownState, standing
from service.spec import Reason

_DUE_TO = re.compile(
    r"^(?:slurmstepd|srun|slurmd)[^\n]*\bCANCELLED AT [^\n]*\bDUE TO ([A-Z ]+)", re.MULTILINE
)
_CAUSES = {
    "PREEMPTION": Reason.PREEMPTED,
    "JOB REQUEUE": Reason.PREEMPTED,
    "NODE FAILURE": Reason.NODE_FAILURE,
    "TIME LIMIT": Reason.TIMEOUT,
}
_OUT_OF_MEMORY = re.compile(
    r"^(?:slurmstepd|srun|slurmd)[^\n]*"
    r"(?:exceeded (?:job |step )?memory limit|oom[-_ ]kill|Out Of Memory|Exceeded job memory)",
    re.MULTILINE | re.IGNORECASE,
)

IN_WORDS = {
    Reason.PREEMPTED: "the job was preempted",
    Reason.NODE_FAILURE: "the job lost a machine",
    Reason.TIMEOUT: "the job was at its time limit",
}
"""Every answer of `why_queued_again`."""


def why_queued_again(run: int, runs: Sequence[SlurmJob], log: str) -> Reason:
    """Why run number `run` (from 0) of a job did not go on.

    Args:
        run: the run.
        runs: all of them, from accounting; may be empty.
        log: the end of that attempt's log.
    """
    if run < len(runs):
        try:
            _, reason = standing(runs[run].state)
        except UnknownState:
            reason = None
        if reason in (Reason.PREEMPTED, Reason.NODE_FAILURE):
            return reason
    causes = [_CAUSES.get(found.strip()) for found in _DUE_TO.findall(log)]
    return next((cause for cause in reversed(causes) if cause), Reason.NODE_FAILURE)


def ran_out_of_memory(log: str) -> bool:
    """Whether SLURM wrote so."""
    return _OUT_OF_MEMORY.search(log) is not None
