"""What KubeRay's words mean: total over the words that it has, and nothing is guessed of others.

A RayJob has two states. `jobDeploymentStatus` is the operator's own and decides. `jobStatus` is
what Ray's dashboard answered when it was last asked; it can be behind, ahead, or an error (a poll
that failed shows there as a word of its own while the job runs), so it only tells how a job that is
over has ended.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from service.launchers.protocol import LauncherUnavailable, Observation, Phase
from service.launchers.ray_memory import says_out_of_memory
from service.spec import Reason

_log = logging.getLogger(__name__)


class Stage(Enum):
    """Where the operator is with a RayJob."""

    NEW = auto()
    """It has not looked at it yet."""
    STARTING = auto()
    """Pods are being made, or the dashboard does not answer yet."""
    RUNNING = auto()
    """The command was handed to Ray."""
    SUSPENDING = auto()
    """Its pods are being taken away."""
    SUSPENDED = auto()
    """It has no pods, and waits to be admitted."""
    COMPLETE = auto()
    """Ray said that the job has ended."""
    FAILED = auto()
    """The job, or the operator's attempts to run it, failed."""
    INVALID = auto()
    """The operator does not take it."""
    AGAIN = auto()
    """It failed, and the operator will start it anew. With `backoffLimit` 0 it does not."""


STAGES: Mapping[str, Stage] = {
    "": Stage.NEW,
    "New": Stage.NEW,
    "Initializing": Stage.STARTING,
    "Waiting": Stage.STARTING,
    "Running": Stage.RUNNING,
    "Suspending": Stage.SUSPENDING,
    "Suspended": Stage.SUSPENDED,
    "Complete": Stage.COMPLETE,
    "Failed": Stage.FAILED,
    "ValidationFailed": Stage.INVALID,
    "Retrying": Stage.AGAIN,
}
"""Every `jobDeploymentStatus`."""

OVER = frozenset({Stage.COMPLETE, Stage.FAILED, Stage.INVALID})

RAY_ENDS: Mapping[str, Reason | None] = {
    "SUCCEEDED": None,
    "FAILED": None,
    "STOPPED": Reason.PREEMPTED,
}
"""Every `jobStatus` of a job that is over, and its cause: a command that failed says none; one that
was stopped was so by somebody else than the service."""

FAILURES: Mapping[str, Reason | None] = {
    "": None,
    "AppFailed": None,
    "DeadlineExceeded": Reason.TIMEOUT,
    "PreRunningDeadlineExceeded": Reason.LAUNCH_FAILED,
    "SubmissionFailed": Reason.LAUNCH_FAILED,
    "ValidationFailed": Reason.LAUNCH_FAILED,
    "JobDeploymentStatusTransitionGracePeriodExceeded": Reason.NODE_FAILURE,
}
"""Every `reason` of a RayJob that failed."""

_EXIT_CODE = re.compile(r"exit code (-?\d+)")


@dataclass(frozen=True, slots=True)
class RayJobStatus:
    """The part of a RayJob's status that says where it is."""

    stage: Stage
    ray: str
    reason: str
    message: str
    started_at: str | None
    """When the operator began to make pods, RFC 3339; null while it has not, or is suspended."""

    @classmethod
    def of(cls, rayjob: Mapping[str, Any]) -> "RayJobStatus":
        """Reads a RayJob.

        Raises:
            LauncherUnavailable: its state has a word that is not known, so nothing is known.
        """
        status = rayjob.get("status") or {}
        word = status.get("jobDeploymentStatus") or ""
        if word not in STAGES:
            name = rayjob["metadata"]["name"]
            _log.error("RayJob %s has the unknown jobDeploymentStatus %r", name, word)
            raise LauncherUnavailable(
                f"RayJob {name} has jobDeploymentStatus {word!r}, which this version does not know"
            )
        return cls(
            stage=STAGES[word],
            ray=status.get("jobStatus") or "",
            reason=status.get("reason") or "",
            message=status.get("message") or "",
            started_at=status.get("startTime"),
        )

    def end(self, name: str) -> Observation:
        """How a RayJob that is over ended.

        Raises:
            LauncherUnavailable: that is told in words that are not known.
        """
        if self.stage is Stage.INVALID:
            return _exited(f"KubeRay refuses the RayJob: {self.message}", Reason.LAUNCH_FAILED)
        if self.stage is Stage.COMPLETE:
            return self._completed(name)
        if self.reason not in FAILURES:
            # That it failed is known; only why is not, and the driver may have said it.
            _log.warning("RayJob %s failed for the unknown reason %r", name, self.reason)
        said, reason = self._first_line(), FAILURES.get(self.reason)
        return _exited(
            f"RayJob {name} failed ({self.reason or 'no reason given'}): {said}",
            Reason.OUT_OF_MEMORY if says_out_of_memory(said) else reason,
            code=self._exit_code(),
        )

    def _completed(self, name: str) -> Observation:
        if self.ray not in RAY_ENDS:
            _log.error("RayJob %s is complete with the unknown jobStatus %r", name, self.ray)
            raise LauncherUnavailable(
                f"RayJob {name} is complete with jobStatus {self.ray!r}, which this version does "
                "not know"
            )
        code = 0 if self.ray == "SUCCEEDED" else self._exit_code()
        return _exited(f"RayJob {name} is complete: {self.ray}", RAY_ENDS[self.ray], code=code)

    def _exit_code(self) -> int | None:
        found = _EXIT_CODE.search(self.message)
        return None if found is None else int(found[1])

    def _first_line(self) -> str:
        """The rest quotes the command's output, which is in the attempt's log."""
        return self.message.strip().partition("\n")[0].strip()[:500]


def _exited(evidence: str, reason: Reason | None, *, code: int | None = None) -> Observation:
    # A shell tells a signal as 128 + its number, Ray as a negative one.
    killed_by = None
    if code is not None and (code < 0 or 128 < code <= 128 + 64):
        killed_by = -code if code < 0 else code - 128
    return Observation(
        phase=Phase.EXITED,
        exit_code=code if killed_by is None else None,
        exit_signal=killed_by,
        reason=reason,
        evidence=evidence,
    )
