"""What Ray's words for a job mean. A state that is not listed is never taken for anything."""

import logging
from collections.abc import Mapping
from typing import Any

from service.launchers.protocol import LauncherUnavailable, Observation, Phase
from service.launchers.ray_jobs.entrypoint import EXIT_NO_FOLDER, EXIT_TAKEN
from service.launchers.ray_memory import says_out_of_memory
from service.spec import Reason

_log = logging.getLogger(__name__)

_MOST_WORDS = 2000

REASON_OF_ERROR: Mapping[str, Reason | None] = {
    "RUNTIME_ENV_SETUP_FAILURE": Reason.LAUNCH_FAILED,
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT": Reason.LAUNCH_FAILED,
    "JOB_SUPERVISOR_ACTOR_START_FAILURE": Reason.LAUNCH_FAILED,
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE": Reason.LAUNCH_FAILED,
    "JOB_ENTRYPOINT_COMMAND_START_ERROR": Reason.LAUNCH_FAILED,
    # The actor that holds the driver, on the driver's machine: it goes with its machine.
    "JOB_SUPERVISOR_ACTOR_DIED": Reason.NODE_FAILURE,
    # Whatever it was, Ray ended the driver for it.
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE": Reason.WORKER_LOST,
    # The driver's own exit, which the driver explains.
    "JOB_ENTRYPOINT_COMMAND_ERROR": None,
}
"""By `error_type` of a FAILED job; null where Ray only saw an exit code."""

_EXPLAINED = {
    EXIT_NO_FOLDER: "the job's folder is not there on the driver's machine: service and workers "
    "must see it under the same path",
    EXIT_TAKEN: "the attempt had been taken already, so this start did nothing",
}


def observe(job: Mapping[str, Any]) -> Observation:
    """What a job's record in Ray says of the attempt.

    Raises:
        LauncherUnavailable: Ray has a word for its state that this version does not know.
    """
    status = job["status"]
    match status:
        case "PENDING":
            return Observation(phase=Phase.QUEUED, evidence=_evidence(job))
        case "RUNNING":
            return Observation(phase=Phase.RUNNING, evidence=_evidence(job))
        case "SUCCEEDED":
            return Observation(phase=Phase.EXITED, exit_code=0, evidence=_evidence(job))
        case "STOPPED":
            # Where it was not the service that asked Ray for it, somebody else took its place.
            return Observation(phase=Phase.EXITED, reason=Reason.PREEMPTED, evidence=_evidence(job))
        case "FAILED":
            return _failed(job)
    _log.error("Ray says %r of the job %s, which is no known state", status, _id(job))
    raise LauncherUnavailable(f"Ray has the unknown word {status!r} for the state of {_id(job)}")


def _failed(job: Mapping[str, Any]) -> Observation:
    error_type, code = job.get("error_type"), job.get("driver_exit_code")
    if error_type is not None and error_type not in REASON_OF_ERROR:
        _log.error("Ray says that %s failed for %r, which is unknown", _id(job), error_type)
    reason = REASON_OF_ERROR.get(str(error_type))
    if error_type is not None and says_out_of_memory(str(job.get("message"))):
        reason = Reason.OUT_OF_MEMORY
    if code == EXIT_NO_FOLDER:
        reason = Reason.LAUNCH_FAILED
    return Observation(
        phase=Phase.EXITED,
        exit_code=code if isinstance(code, int) and code >= 0 else None,
        exit_signal=-code if isinstance(code, int) and code < 0 else None,
        reason=reason,
        evidence=_EXPLAINED.get(code, _evidence(job)) if code is not None else _evidence(job),
    )


def _evidence(job: Mapping[str, Any]) -> str:
    parts = [f"Ray: {job['status']}", job.get("error_type"), job.get("message")]
    return ", ".join(str(part) for part in parts if part)[:_MOST_WORDS]


def _id(job: Mapping[str, Any]) -> str:
    return str(job.get("submission_id"))
