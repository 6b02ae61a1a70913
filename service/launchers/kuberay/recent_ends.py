"""Ends that were seen for a moment only, and would be asked for later.

The operator is quick to delete a head that died, and Kueue to admit again what it evicted. What the
watch saw of either is kept here; a service that was away then must do without.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from service.launchers.kuberay import names
from service.launchers.kuberay.pod_reasons import death, is_head
from service.launchers.kuberay.states import STAGES, Stage
from service.spec import Reason

_MOST = 1000


class RecentEnds:
    """Deaths of heads and evictions of RayJobs, by uid."""

    def __init__(self, has_started: Callable[[str, int], bool]) -> None:
        """Knows nothing yet.

        Args:
            has_started: whether the driver of an attempt of a job was ever started.
        """
        self._has_started = has_started
        self._lock = threading.Lock()
        self._deaths: OrderedDict[str, tuple[Reason | None, str]] = OrderedDict()
        self._evicted: OrderedDict[str, None] = OrderedDict()

    def death(self, uid: str | None) -> tuple[Reason | None, str]:
        """What was last seen of a head's end: what it means, and in Kubernetes' words."""
        with self._lock:
            return self._deaths.get(uid or "", (None, ""))

    def was_evicted(self, uid: str) -> bool:
        """Whether a RayJob lost its pods after its driver had started."""
        with self._lock:
            return uid in self._evicted

    def see_pod(self, pod: Mapping[str, Any]) -> None:
        """Takes in a pod that changed or went."""
        reason, said = death(pod)
        if is_head(pod) and said:
            with self._lock:
                self._deaths[pod["metadata"]["uid"]] = (reason, said)
                _bound(self._deaths)

    def see_rayjob(self, found: Mapping[str, Any]) -> None:
        """Takes in a RayJob that changed or went.

        The operator suspends one that was made suspended in the same words; that had no driver.
        """
        word = (found.get("status") or {}).get("jobDeploymentStatus") or ""
        if STAGES.get(word) is not Stage.SUSPENDING:
            return
        metadata = found["metadata"]
        job_id = (metadata.get("annotations") or {}).get(names.JOB_ANNOTATION)
        attempt = metadata["labels"].get(names.ATTEMPT_LABEL, "")
        if job_id and attempt.isdecimal() and self._has_started(job_id, int(attempt)):
            with self._lock:
                self._evicted[metadata["uid"]] = None
                _bound(self._evicted)


def _bound(remembered: OrderedDict[str, Any]) -> None:
    while len(remembered) > _MOST:
        remembered.popitem(last=False)
