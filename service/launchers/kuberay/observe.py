"""What is to be said of an attempt, from all that is known of it: a pure function.

The driver's life is that of one pod, whose uid the attempt's folder has (`Record.head`). When that
pod is gone the attempt is over, whatever the operator does next: it makes a new head and runs the
command again, or Kueue admits the RayJob a second time. What runs then is no part of this attempt,
but a leftover of it, which is to be ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from service.launchers.kuberay.manifest import KUEUE_QUEUE_LABEL
from service.launchers.kuberay.pod_reasons import (
    death,
    has_ended,
    hindrances,
    is_going,
    is_lost,
    name_of,
)
from service.launchers.kuberay.states import OVER, RayJobStatus, Stage
from service.launchers.protocol import Observation, Phase
from service.spec import Reason

_CASCADE = "foregroundDeletion"
"""The garbage collector's finalizer: on an object until all that belongs to it is gone."""
_SUSPENDED = (Stage.SUSPENDING, Stage.SUSPENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One look at an attempt."""

    rayjob: Mapping[str, Any] | None
    pods: Sequence[Mapping[str, Any]]
    head: str | None
    """Uid of the driver's pod, read before `pods` were."""
    now: float
    """Seconds since the epoch."""
    startup_seconds: float
    shut_out: bool = False
    ran_out_of_memory: bool = False
    earlier_death: tuple[Reason | None, str] = (None, "")
    """What was last seen of the driver's pod, where it is gone."""
    evicted: bool = False
    """Whether the RayJob was seen being suspended."""
    events: Sequence[Mapping[str, Any]] = ()
    """Of its Ray cluster, where somebody asked for them."""
    verdict: Observation | None = None
    """How it ended, where that was seen before."""


def observe(sight: Sight) -> Observation:
    """What a launcher says of the attempt.

    Raises:
        LauncherUnavailable: KubeRay uses words that are not known.
    """
    status = None if sight.rayjob is None else RayJobStatus.of(sight.rayjob)
    left = len(sight.pods) + _makes_pods(sight.rayjob, status)
    seen = sight.verdict or _observe(sight, status)
    return replace(seen, leftovers=left) if seen.phase is Phase.EXITED else seen


def _makes_pods(rayjob: Mapping[str, Any] | None, status: RayJobStatus | None) -> bool:
    """Whether more pods may come of the RayJob.

    One whose deletion has ended everything below it may still be there: the operator takes its
    finalizer off last, which waits for Kueue's webhook where that is away.
    """
    if rayjob is None or status is None:
        return False
    if is_going(rayjob):
        return _CASCADE in (rayjob["metadata"].get("finalizers") or ())
    return status.stage not in OVER


def is_overdue(sight: Sight) -> bool:
    """Whether the driver should have started by now, and has not."""
    if sight.rayjob is None or sight.head is not None or sight.verdict is not None:
        return False
    status = RayJobStatus.of(sight.rayjob)
    if status.stage in OVER or status.stage in _SUSPENDED or is_going(sight.rayjob):
        return False
    since = _starting_since(sight.rayjob, status)
    return since is not None and sight.now - since > sight.startup_seconds


def _observe(sight: Sight, status: RayJobStatus | None) -> Observation:
    if sight.rayjob is None or status is None:
        return _without_rayjob(sight)
    if status.stage in OVER:
        return _explained(status.end(name_of(sight.rayjob)), sight)
    if sight.head is not None:
        return _after_start(sight, status, sight.head)
    return _before_start(sight, sight.rayjob, status)


def _without_rayjob(sight: Sight) -> Observation:
    if sight.shut_out:
        return _exited("its RayJob was deleted")
    if sight.head is not None or sight.pods:
        return _exited("its RayJob was deleted, but not by this service", Reason.PREEMPTED)
    return Observation(phase=Phase.UNKNOWN, evidence="there is no RayJob of it")


def _after_start(sight: Sight, status: RayJobStatus, head: str) -> Observation:
    pod = next((pod for pod in sight.pods if pod["metadata"]["uid"] == head), None)
    cut_off = pod is not None and not has_ended(pod) and is_lost(pod, sight.now)
    if pod is not None and not has_ended(pod) and not cut_off:
        doing = "is being ended" if is_going(pod) else "runs"
        return Observation(phase=Phase.RUNNING, evidence=f"the driver's pod {name_of(pod)} {doing}")
    reason, said = sight.earlier_death if pod is None else death(pod)
    if sight.ran_out_of_memory:
        return _exited("the driver was killed for want of memory", Reason.OUT_OF_MEMORY)
    if reason is None and (sight.evicted or status.stage in _SUSPENDED):
        return _exited("its RayJob was suspended while it ran", Reason.PREEMPTED)
    lost = "the pod of head and driver is gone"
    if cut_off:
        lost = "the pod of head and driver does not end; its node seems to be gone"
    return _exited(f"{lost}: {said}" if said else lost, reason or Reason.NODE_FAILURE)


def _before_start(sight: Sight, rayjob: Mapping[str, Any], status: RayJobStatus) -> Observation:
    if is_going(rayjob):
        if sight.shut_out:
            return _exited("its RayJob was deleted before its driver started")
        gone = "its RayJob was deleted before its driver started, but not by this service"
        return _exited(gone, Reason.PREEMPTED)
    hindrance = hindrances(sight.pods, sight.events)
    if is_overdue(sight):
        return _exited(
            f"the driver did not start within {sight.startup_seconds:g} s: "
            f"{hindrance or status.message or _silence(status)}",
            Reason.LAUNCH_FAILED,
        )
    if status.stage is Stage.NEW and _is_admitted(rayjob):
        # It is never overdue, since nothing says when it was admitted.
        hindrance = hindrance or _silence(status)
    phase = Phase.RUNNING if status.stage is Stage.RUNNING else Phase.QUEUED
    word = status.stage.name.lower()
    return Observation(phase=phase, evidence=f"RayJob {word}; {hindrance}".removesuffix("; "))


def _silence(status: RayJobStatus) -> str:
    if status.stage is Stage.NEW:
        return "the KubeRay operator has not looked at the RayJob; does it run?"
    return "Kubernetes gives no reason"


def _starting_since(rayjob: Mapping[str, Any], status: RayJobStatus) -> float | None:
    """When its start began, in seconds since the epoch; null where it waits to be admitted.

    A RayJob that was suspended and is just admitted is new again, and has an earlier start's time.
    """
    if status.started_at is not None and status.stage is not Stage.NEW:
        return _seconds(status.started_at)
    if _is_queued(rayjob):
        return None
    return _seconds(rayjob["metadata"]["creationTimestamp"])


def _is_queued(rayjob: Mapping[str, Any]) -> bool:
    return KUEUE_QUEUE_LABEL in (rayjob["metadata"].get("labels") or {})


def _is_admitted(rayjob: Mapping[str, Any]) -> bool:
    """It was made suspended; once it is not, the server may leave `suspend` out."""
    return _is_queued(rayjob) and not rayjob["spec"].get("suspend")


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def _explained(end: Observation, sight: Sight) -> Observation:
    """The operator's word on an end, with what pods and kernel know of its cause."""
    if end.reason is not None or end.exit_code == 0:
        return end
    if sight.ran_out_of_memory:
        evidence = f"the driver was killed for want of memory; {end.evidence}"
        return replace(end, reason=Reason.OUT_OF_MEMORY, evidence=evidence)
    deaths = [death(pod) for pod in sight.pods if pod["metadata"]["uid"] == sight.head]
    for reason, said in (*deaths, sight.earlier_death):
        if reason is not None:
            return replace(end, reason=reason, evidence=f"{said}; {end.evidence}")
    return end


def _exited(evidence: str, reason: Reason | None = None) -> Observation:
    return Observation(phase=Phase.EXITED, reason=reason, evidence=evidence)
