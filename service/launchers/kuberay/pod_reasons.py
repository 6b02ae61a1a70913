"""What pods and events say, in Kubernetes' own words: why one does not start, and how one died."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from service.spec import Reason

_HARMLESS = frozenset({"ContainerCreating", "PodInitializing"})
_MOST = 5
_LOST_SECONDS = 60.0
"""A pod that is still there this long after it was to end is on a node that is gone."""

_DISRUPTIONS: Mapping[str, Reason] = {
    "PreemptionByScheduler": Reason.PREEMPTED,
    "EvictionByEvictionAPI": Reason.PREEMPTED,
    "TerminationByKubelet": Reason.PREEMPTED,
    "DeletionByTaintManager": Reason.NODE_FAILURE,
    "DeletionByPodGC": Reason.NODE_FAILURE,
}
"""Reasons of the condition DisruptionTarget, and what they mean for an attempt."""

_POD_REASONS: Mapping[str, Reason] = {
    "Evicted": Reason.PREEMPTED,
    "Preempting": Reason.PREEMPTED,
    "Shutdown": Reason.NODE_FAILURE,
    "Terminated": Reason.NODE_FAILURE,
    "NodeLost": Reason.NODE_FAILURE,
    "NodeShutdown": Reason.NODE_FAILURE,
    "NodeAffinity": Reason.NODE_FAILURE,
    "UnexpectedAdmissionError": Reason.LAUNCH_FAILED,
    "OOMKilled": Reason.OUT_OF_MEMORY,
}
"""`status.reason` of a pod that failed."""


def name_of(thing: Mapping[str, Any]) -> str:
    """Its name."""
    return str(thing["metadata"]["name"])


def is_head(pod: Mapping[str, Any]) -> bool:
    """Whether the pod is the head of its Ray cluster."""
    return (pod["metadata"].get("labels") or {}).get("ray.io/node-type") == "head"


def has_ended(pod: Mapping[str, Any]) -> bool:
    """Whether none of its containers runs or will."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def is_going(pod: Mapping[str, Any]) -> bool:
    """Whether its deletion has been asked for."""
    return "deletionTimestamp" in pod["metadata"]


def is_lost(pod: Mapping[str, Any], now: float) -> bool:
    """Whether it should have ended long ago, so that its node is gone or cut off.

    The server keeps such a pod, as running, until its kubelet is back. The time of its deletion
    has its grace in it.
    """
    if not is_going(pod):
        return False
    due = datetime.fromisoformat(pod["metadata"]["deletionTimestamp"]).timestamp()
    return now - due > _LOST_SECONDS


def hindrances(pods: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> str:
    """Why an attempt's pods are not up, in one line; empty where nothing is said."""
    said = [line for pod in pods for line in _pod_hindrances(pod)]
    if not said:
        said = [
            f"{event.get('reason')}: {event.get('message')}"
            for event in events
            if event.get("type") == "Warning"
        ]
    return "; ".join(dict.fromkeys(said[:_MOST]))


def death(pod: Mapping[str, Any]) -> tuple[Reason | None, str]:
    """How a pod ended or why it is being ended: what that means, and in Kubernetes' words."""
    status = pod.get("status") or {}
    for container in _containers(status):
        for state in ("state", "lastState"):
            ended = (container.get(state) or {}).get("terminated") or {}
            if ended.get("reason") == "OOMKilled":
                limit = f"container {container['name']} was OOMKilled"
                return Reason.OUT_OF_MEMORY, f"pod {name_of(pod)}: {limit}"
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            word = condition.get("reason", "")
            said = f"pod {name_of(pod)}: {word}: {condition.get('message', '')}"
            return _DISRUPTIONS.get(word, Reason.NODE_FAILURE), said
    word = status.get("reason") or ""
    if word:
        return _POD_REASONS.get(word), f"pod {name_of(pod)}: {word}: {status.get('message', '')}"
    return None, ""


def _pod_hindrances(pod: Mapping[str, Any]) -> list[str]:
    status = pod.get("status") or {}
    said = [
        f"{condition.get('reason')}: {condition.get('message', '')}"
        for condition in status.get("conditions") or ()
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False"
    ]
    for container in _containers(status):
        state = container.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        if waiting and waiting.get("reason") not in _HARMLESS:
            said.append(f"{waiting.get('reason')}: {waiting.get('message', '')}")
        if ended and ended.get("exitCode"):
            said.append(
                f"container {container['name']} exited with code {ended['exitCode']} "
                f"({ended.get('reason', '')})"
            )
    return [f"pod {name_of(pod)}: {line.strip().rstrip(':')}" for line in said]


def _containers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]
