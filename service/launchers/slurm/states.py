"""Every word that SLURM (22.05 to 25.x) has for the state of a job, and what it means to us.

A job has one base state (`PENDING`, `RUNNING`, ..., `OUT_OF_MEMORY`) and may have flags
(`COMPLETING`, `CONFIGURING`, ...). Releases tell them in different ways: one word, which is a flag
where there is one (22.05); a list of both (from 23.11); in sacct's columns with a tail, as
`CANCELLED by 1001` or `CANCELLED+`. All come down to a set of words here.

A word that is in no list below is never taken for an end, and never for success: `UnknownState`.
"""

import re
from collections.abc import Iterable
from enum import Enum

from service.launchers.protocol import Phase
from service.spec import Reason


class UnknownState(Exception):
    """SLURM says a word for a state that this version does not know."""


class Standing(Enum):
    """What a job of SLURM is at."""

    QUEUED = "queued"
    RUNNING = "running"
    BACK_SOON = "back-soon"
    """Lost its machines in a way after which SLURM queues a job again, where it may."""
    ENDED = "ended"

    @property
    def phase(self) -> Phase:
        """Of an attempt whose job is at this."""
        match self:
            case Standing.QUEUED:
                return Phase.QUEUED
            case Standing.ENDED:
                return Phase.EXITED
            case _:
                return Phase.RUNNING


_BASE: dict[str, tuple[Standing, Reason | None]] = {
    "PENDING": (Standing.QUEUED, None),
    "RUNNING": (Standing.RUNNING, None),
    "SUSPENDED": (Standing.RUNNING, None),
    "COMPLETED": (Standing.ENDED, None),
    "FAILED": (Standing.ENDED, None),
    "CANCELLED": (Standing.ENDED, Reason.CANCELLED),
    "TIMEOUT": (Standing.ENDED, Reason.TIMEOUT),
    "DEADLINE": (Standing.ENDED, Reason.TIMEOUT),
    "OUT_OF_MEMORY": (Standing.ENDED, Reason.OUT_OF_MEMORY),
    "NODE_FAIL": (Standing.BACK_SOON, Reason.NODE_FAILURE),
    "BOOT_FAIL": (Standing.BACK_SOON, Reason.NODE_FAILURE),
    "PREEMPTED": (Standing.BACK_SOON, Reason.PREEMPTED),
}
"""Base states. FAILED has no reason: the driver's exit is its own to explain. REVOKED is missing:
another cluster of a federation runs the job, which is no end and cannot be followed."""

_QUEUED_FLAGS = frozenset(
    {
        "CONFIGURING",  # machines boot for it
        "POWER_UP_NODE",
        "REQUEUED",
        "REQUEUE",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",  # held after a special exit code
        "RECONFIG_FAIL",
    }
)
_RUNNING_FLAGS = frozenset(
    {"COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING", "STOPPED", "EXPEDITING"}
)
"""Its processes, or files that are staged out, may still be there: not ended yet."""
_SILENT_FLAGS = frozenset({"LAUNCH_FAILED", "UPDATE_DB"})
"""They come beside a base state and change nothing."""

_SHORT = {
    "BF": "BOOT_FAIL", "CA": "CANCELLED", "CD": "COMPLETED", "CF": "CONFIGURING",
    "CG": "COMPLETING", "DL": "DEADLINE", "F": "FAILED", "NF": "NODE_FAIL",
    "OOM": "OUT_OF_MEMORY", "PD": "PENDING", "PR": "PREEMPTED", "R": "RUNNING",
    "RD": "RESV_DEL_HOLD", "RF": "REQUEUE_FED", "RH": "REQUEUE_HOLD", "RQ": "REQUEUED",
    "RS": "RESIZING", "RV": "REVOKED", "S": "SUSPENDED", "SE": "SPECIAL_EXIT",
    "SI": "SIGNALING", "SO": "STAGE_OUT", "ST": "STOPPED", "TO": "TIMEOUT",
}  # fmt: skip

KNOWN = frozenset(_BASE) | _QUEUED_FLAGS | _RUNNING_FLAGS | _SILENT_FLAGS


def words(state: object) -> tuple[str, ...]:
    """The words of a state, in any of the forms that SLURM's commands print.

    Args:
        state: a string, as `CANCELLED by 1001`, `RUNNING+COMPLETING` or `CG`; or a list of such.

    Raises:
        UnknownState: it is neither, or says nothing.
    """
    parts: Iterable[object] = state if isinstance(state, list | tuple) else (state,)
    found: list[str] = []
    for part in parts:
        if not isinstance(part, str):
            raise UnknownState(f"SLURM tells a state as {state!r}, which is no word")
        # Only the first of the words between blanks counts: what follows says by whom.
        first = part.strip().split(" ", 1)[0]
        found += [_SHORT.get(word, word) for word in re.split(r"[+,|]", first.upper()) if word]
    if not found:
        raise UnknownState(f"SLURM tells the empty state {state!r}")
    return tuple(found)


def standing(state: object) -> tuple[Standing, Reason | None]:
    """What a job in this state is at, and why, where the state says so.

    Raises:
        UnknownState: a word of it is not known.
    """
    said = words(state)
    unknown = [word for word in said if word not in KNOWN]
    if unknown:
        raise UnknownState(f"SLURM says {' '.join(unknown)!r}, a state that is not known here")
    base = [_BASE[word] for word in said if word in _BASE]
    reason = next((why for _, why in base if why is not None), None)
    # A flag says more than the base state beside it: COMPLETED and COMPLETING has not ended.
    if _RUNNING_FLAGS.intersection(said):
        return Standing.RUNNING, reason
    if _QUEUED_FLAGS.intersection(said):
        return Standing.QUEUED, reason
    if not base:
        raise UnknownState(f"SLURM says {' '.join(said)!r} and no state beside it")
    return base[0][0], reason
