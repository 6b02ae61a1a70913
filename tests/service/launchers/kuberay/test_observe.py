from dataclasses import replace
from typing import Any

import pytest

from service.launchers import Observation, Phase
from service.launchers.kuberay.manifest import KUEUE_QUEUE_LABEL
from service.launchers.kuberay.observe import Sight, is_overdue, observe
from service.launchers.kuberay.pod_reasons import death
from service.spec import Reason
from tests.service.launchers.kuberay.attempts import pod, rayjob

STARTED = "1970-01-01T00:16:40Z"  # second 1000


def sight(found: dict[str, Any] | None, **more: Any) -> Sight:
    fields: dict[str, Any] = {"pods": [], "head": None, "now": 1010.0, "startup_seconds": 60.0}
    return Sight(rayjob=found, **{**fields, **more})


def brief(seen: Observation) -> tuple[Phase, Reason | None, int]:
    return seen.phase, seen.reason, seen.leftovers


@pytest.mark.parametrize(
    ("word", "phase"),
    [
        ("", Phase.QUEUED),
        ("Initializing", Phase.QUEUED),
        ("Running", Phase.RUNNING),
        ("Suspended", Phase.QUEUED),
        ("Suspending", Phase.QUEUED),
    ],
)
def test_before_the_driver_starts(word: str, phase: Phase) -> None:
    assert observe(sight(rayjob(word))).phase is phase


def test_g13_a_poll_of_rays_that_failed_changes_nothing() -> None:
    phases = [
        observe(sight(rayjob("Running", jobStatus=ray), pods=[pod()], head="uid-head")).phase
        for ray in ("RUNNING", "Failure", "", "PENDING", "SOMETHING", "RUNNING")
    ]
    assert phases == [Phase.RUNNING] * 6


def test_g11_a_head_that_is_lost_ends_the_attempt_whatever_the_operator_does_next() -> None:
    new = pod("uid-new-head")
    for word in ("Running", "Initializing", "Retrying", ""):
        seen = observe(sight(rayjob(word), pods=[new], head="uid-head"))
        assert brief(seen) == (Phase.EXITED, Reason.NODE_FAILURE, 2), word
    dead = pod(phase="Failed", reason="NodeShutdown", message="the node went down")
    seen = observe(sight(rayjob("Running"), pods=[dead], head="uid-head"))
    assert brief(seen) == (Phase.EXITED, Reason.NODE_FAILURE, 2)
    assert "the node went down" in seen.evidence


def test_a_head_on_a_node_that_is_cut_off_is_lost_a_minute_after_it_was_to_end() -> None:
    """The server has such a pod as running until its kubelet is back, which may be never."""
    tainted = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "DeletionByTaintManager",
        "message": "Taint manager: deleting due to NoExecute taint",
    }
    for more, said in (({}, "its node seems to be gone"), ({"conditions": [tainted]}, "NoExecute")):
        going = pod(**more)
        going["metadata"]["deletionTimestamp"] = STARTED  # with the grace in it
        found = sight(rayjob("Running"), pods=[going], head="uid-head", now=1059.0)
        assert observe(found).phase is Phase.RUNNING
        seen = observe(replace(found, now=1061.0))
        assert brief(seen) == (Phase.EXITED, Reason.NODE_FAILURE, 2)
        assert said in seen.evidence


def test_g33_an_evicted_attempt_is_over_and_one_that_never_ran_still_waits() -> None:
    assert observe(sight(rayjob("Suspended"))).phase is Phase.QUEUED
    going = pod()
    going["metadata"]["deletionTimestamp"] = STARTED
    assert observe(sight(rayjob("Suspending"), pods=[going], head="uid-head")).phase is (
        Phase.RUNNING
    )
    for word, evicted in (("Suspended", False), ("Initializing", True), ("Running", True)):
        seen = observe(sight(rayjob(word), head="uid-head", evicted=evicted))
        assert brief(seen) == (Phase.EXITED, Reason.PREEMPTED, 1), word


def test_g09_a_start_that_takes_too_long_tells_the_pods_reason() -> None:
    waiting = {"name": "ray", "state": {"waiting": {"reason": "ErrImagePull", "message": "no x"}}}
    late = sight(
        rayjob("Initializing", startTime=STARTED),
        pods=[pod(phase="Pending", containerStatuses=[waiting])],
        now=1061.0,
    )
    assert is_overdue(late)
    seen = observe(late)
    assert brief(seen) == (Phase.EXITED, Reason.LAUNCH_FAILED, 2)
    assert "did not start within 60 s" in seen.evidence
    assert "ErrImagePull: no x" in seen.evidence


def test_g09_a_node_that_cannot_be_had_and_a_quota_are_told_too() -> None:
    unschedulable = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
    }
    pending = pod(phase="Pending", conditions=[unschedulable])
    late = sight(rayjob("Initializing", startTime=STARTED), pods=[pending], now=1100.0)
    assert "Insufficient nvidia.com/gpu" in observe(late).evidence
    quota = {"type": "Warning", "reason": "FailedToCreateHeadPod", "message": "exceeded quota: q"}
    harmless = {"type": "Normal", "reason": "Created", "message": "all is well"}
    none = sight(rayjob("Initializing", startTime=STARTED), now=1100.0, events=[quota, harmless])
    assert "exceeded quota: q" in observe(none).evidence
    assert "all is well" not in observe(none).evidence


def test_the_time_in_a_queue_is_no_start() -> None:
    queued = rayjob("")
    queued["metadata"]["labels"] = {KUEUE_QUEUE_LABEL: "q"}
    assert not is_overdue(sight(queued, now=9e9))
    queued["status"] = {"jobDeploymentStatus": "New", "startTime": STARTED}
    assert not is_overdue(sight(queued, now=9e9))
    assert not is_overdue(sight(rayjob("Suspended", startTime=STARTED), now=9e9))
    assert is_overdue(sight(rayjob(""), now=9e9))
    assert not is_overdue(sight(rayjob("Running", startTime=STARTED), head="uid-head", now=9e9))
    assert is_overdue(sight(rayjob("Running", startTime=STARTED), now=9e9))


def test_an_admitted_rayjob_that_no_operator_looks_at_says_so() -> None:
    queued = rayjob("")
    queued["metadata"]["labels"] = {KUEUE_QUEUE_LABEL: "q"}
    looks = "operator has not looked at"
    # What is false, the server may leave out.
    for spec, said in (({"suspend": True}, "RayJob new"), ({"suspend": False}, looks), ({}, looks)):
        queued["spec"] = spec
        seen = observe(sight(queued, now=9e9))
        assert seen.phase is Phase.QUEUED
        assert said in seen.evidence
        assert ("operator" in seen.evidence) is not spec.get("suspend", False)


def test_who_deleted_a_rayjob_makes_the_difference() -> None:
    assert observe(sight(None)).phase is Phase.UNKNOWN
    assert brief(observe(sight(None, shut_out=True))) == (Phase.EXITED, None, 0)
    assert brief(observe(sight(None, head="uid-head", pods=[pod()]))) == (
        *(Phase.EXITED, Reason.PREEMPTED, 1),
    )
    going = rayjob("Initializing")
    going["metadata"]["deletionTimestamp"] = STARTED
    assert brief(observe(sight(going, shut_out=True, pods=[pod()]))) == (Phase.EXITED, None, 1)
    # Its pods are made by what belongs to it; a finalizer of the operator's alone makes none.
    for finalizers, left in (
        (["ray.io/rayjob-finalizer", "foregroundDeletion"], 1),
        (["ray.io/rayjob-finalizer"], 0),
    ):
        going["metadata"]["finalizers"] = finalizers
        assert brief(observe(sight(going, shut_out=True))) == (Phase.EXITED, None, left)
    assert observe(sight(going)).reason is Reason.PREEMPTED
    # It has the grace that it was given, as long as its driver's pod is there.
    ending = observe(sight(going, shut_out=True, pods=[pod()], head="uid-head"))
    assert ending.phase is Phase.RUNNING


def test_want_of_memory_is_found_wherever_it_shows() -> None:
    killed = {"name": "ray", "state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}
    dead = pod(phase="Failed", containerStatuses=[killed])
    failed = rayjob("Failed", reason="AppFailed", message="exit code 137")
    for seen in (
        observe(sight(rayjob("Running"), pods=[dead], head="uid-head")),
        observe(sight(rayjob("Running"), head="uid-head", earlier_death=death(dead))),
        observe(sight(rayjob("Running"), head="uid-head", ran_out_of_memory=True)),
        observe(sight(failed, head="uid-head", ran_out_of_memory=True)),
        observe(sight(failed, head="uid-head", pods=[dead])),
        observe(sight(failed, head="uid-head", earlier_death=death(dead))),
    ):
        assert seen.reason is Reason.OUT_OF_MEMORY
        assert seen.evidence


def test_an_end_stays_as_it_was_first_seen() -> None:
    first = Observation(phase=Phase.EXITED, exit_code=3, evidence="said once")
    for found in (None, rayjob("Running", startTime=STARTED), rayjob("Complete")):
        seen = observe(sight(found, verdict=first, now=9e9, pods=[pod()]))
        assert (seen.exit_code, seen.evidence) == (3, "said once")
        assert seen.leftovers == 1 + (found is not None and found != rayjob("Complete"))


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("PreemptionByScheduler", Reason.PREEMPTED),
        ("EvictionByEvictionAPI", Reason.PREEMPTED),
        ("DeletionByTaintManager", Reason.NODE_FAILURE),
        ("TomorrowsWord", Reason.NODE_FAILURE),
    ],
)
def test_why_a_pod_was_disrupted(word: str, reason: Reason) -> None:
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": word, "message": "so"}
    assert death(pod(conditions=[disrupted])) == (reason, f"pod pod-uid-head: {word}: so")
    assert death(pod()) == (None, "")
