from typing import Any

from service.launchers.kuberay import recent_ends
from service.launchers.kuberay.names import ATTEMPT_LABEL, JOB_ANNOTATION
from service.launchers.kuberay.recent_ends import RecentEnds
from service.spec import Reason
from tests.service.launchers.kuberay.attempts import pod, rayjob


def suspending(job_id: str) -> dict[str, Any]:
    found = rayjob("Suspending")
    found["metadata"] |= {"uid": f"uid-{job_id}", "annotations": {JOB_ANNOTATION: job_id}}
    found["metadata"]["labels"][ATTEMPT_LABEL] = "1"
    return found


def test_g33_only_who_ran_was_evicted() -> None:
    kept = RecentEnds(lambda job_id, attempt: (job_id, attempt) == ("ran", 1))
    for job_id in ("ran", "queued"):
        kept.see_rayjob(suspending(job_id))
    kept.see_rayjob(rayjob("Running"))
    assert kept.was_evicted("uid-ran")
    assert not kept.was_evicted("uid-queued")
    assert not kept.was_evicted("uid-rayjob")


def test_a_heads_last_words_are_kept_and_a_bounded_number_of_them() -> None:
    kept = RecentEnds(lambda *_: True)
    for number in range(recent_ends._MOST + 1):
        kept.see_pod(pod(f"uid-{number}", reason="Evicted", message="disk pressure"))
    kept.see_pod(pod("well"))
    worker = pod("worker", reason="Evicted")
    worker["metadata"]["labels"] = {}
    kept.see_pod(worker)
    assert kept.death("uid-1") == (Reason.PREEMPTED, "pod pod-uid-1: Evicted: disk pressure")
    for unknown in ("uid-0", "well", "worker", None):
        assert kept.death(unknown) == (None, "")
