"""What the launcher asks of the API server, step by step; `tests/cluster` has the real one."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.launchers import LaunchError, LauncherUnavailable, Phase, Site
from service.launchers.kuberay import names, watch
from service.launchers.kuberay.launcher import KubeRayLauncher
from service.launchers.kuberay.record import Record
from service.spec import Reason
from tests.service.launchers.kuberay.api_server import (
    Answer,
    ApiServer,
    Asked,
    listed,
    refusal,
    serving,
)
from tests.service.launchers.kuberay.attempts import JOB, cluster, pod, request

ID = names.launcher_id(JOB, 1)
NAME = names.rayjob_name(JOB, 1)


class Cluster:
    """A namespace's RayJobs and pods."""

    def __init__(self) -> None:
        self.rayjobs: dict[str, dict[str, Any]] = {}
        self.pods: list[dict[str, Any]] = []
        self.refuse: Answer | None = None

    def __call__(self, asked: Asked) -> Answer:
        if self.refuse is not None:
            return self.refuse
        if "watch" in asked.query:
            return Answer(events=[])
        return {"GET": self._get, "POST": self._post, "DELETE": self._delete}[asked.method](asked)

    def _get(self, asked: Asked) -> Answer:
        last = asked.path.rpartition("/")[2]
        if last == "pods":
            return listed(1, *self.pods)
        if last == "rayjobs":
            return listed(1, *self.rayjobs.values())
        if last == "events":
            return listed(1)
        return Answer(self.rayjobs[last]) if last in self.rayjobs else refusal(404, "not found")

    def _post(self, asked: Asked) -> Answer:
        name = asked.body["metadata"]["name"]
        if name in self.rayjobs:
            return refusal(409, "already exists")
        more = {"uid": name, "creationTimestamp": "2026-01-01T00:00:00Z"}
        asked.body["metadata"] |= more
        self.rayjobs[name] = asked.body
        return Answer(asked.body, status=201)

    def _delete(self, asked: Asked) -> Answer:
        name = asked.path.rpartition("/")[2]
        if "/pods/" in asked.path:
            self.pods = [each for each in self.pods if each["metadata"]["name"] != name]
            return Answer({})
        return Answer({}) if self.rayjobs.pop(name, None) else refusal(404, "not found")


@pytest.fixture
def kubernetes() -> Cluster:
    return Cluster()


@pytest.fixture
def server(tmp_path: Path, kubernetes: Cluster) -> Iterator[ApiServer]:
    with serving(tmp_path, kubernetes) as made:
        yield made


@pytest.fixture
def jobs_dir(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@pytest.fixture
def launcher(server: ApiServer, jobs_dir: Path) -> Iterator[KubeRayLauncher]:
    config = cluster(kubeconfig=str(server.kubeconfig), namespace="ns", startup_seconds=9e9)
    made = config.open(Site(jobs_dir=jobs_dir))
    yield made
    made.close()


@pytest.fixture
def record(jobs_dir: Path) -> Record:
    return Record(jobs_dir / JOB / "attempts/1")


def test_a_second_submit_finds_the_first(launcher: KubeRayLauncher, kubernetes: Cluster) -> None:
    for _ in range(2):
        launcher.submit(request())
    assert list(kubernetes.rayjobs) == [NAME]
    assert launcher.poll(ID).phase is Phase.QUEUED


def test_what_was_cancelled_never_comes_back(
    launcher: KubeRayLauncher, kubernetes: Cluster, record: Record
) -> None:
    assert launcher.poll(ID).phase is Phase.UNKNOWN
    launcher.submit(request())
    launcher.cancel(ID, 0.0)
    assert record.is_shut_out
    launcher.submit(request())
    assert kubernetes.rayjobs == {}
    seen = launcher.poll(ID)
    assert (seen.phase, seen.reason, seen.leftovers) == (Phase.EXITED, None, 0)


def test_a_cancel_between_a_submits_look_and_its_request_is_seen_after_it(
    launcher: KubeRayLauncher, kubernetes: Cluster, server: ApiServer, record: Record
) -> None:
    def cancelled_meanwhile(asked: Asked) -> Answer:
        if asked.method == "POST":
            record.shut_out()
        return kubernetes(asked)

    server.reply = cancelled_meanwhile
    launcher.submit(request())
    assert kubernetes.rayjobs == {}


def test_a_driver_that_was_started_is_not_started_again_though_its_rayjob_is_gone(
    launcher: KubeRayLauncher, kubernetes: Cluster, record: Record
) -> None:
    record.path.mkdir(parents=True)
    (record.path / "head").write_text("uid-head\n")
    launcher.submit(request())
    assert kubernetes.rayjobs == {}
    assert launcher.poll(ID).reason is Reason.PREEMPTED


def test_earlier_attempts_are_cleared_away_and_other_jobs_are_not(
    launcher: KubeRayLauncher, kubernetes: Cluster, server: ApiServer
) -> None:
    launcher.submit(request())
    launcher.submit(request(attempt=2))
    assert list(kubernetes.rayjobs) == [names.rayjob_name(JOB, 2)]
    selectors = [
        asked.query["labelSelector"]
        for asked in server.asked
        if asked.query.get("labelSelector", "").startswith("planish.io/job")
    ]
    assert set(selectors) == {f"planish.io/job={JOB}"}


def test_somebody_elses_rayjob_of_that_name_is_no_attempt(
    launcher: KubeRayLauncher, kubernetes: Cluster
) -> None:
    kubernetes.rayjobs[NAME] = {
        "metadata": {"name": NAME, "labels": {names.ATTEMPT_LABEL: "1"}, "annotations": {}}
    }
    with pytest.raises(LaunchError, match="of somebody else"):
        launcher.submit(request())


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (403, LaunchError, "exceeded quota"),
        (422, LaunchError, "refuses the RayJob"),
        (500, LauncherUnavailable, "answered 500"),
    ],
)
def test_a_refusal_is_an_error_and_a_silence_is_none(
    launcher: KubeRayLauncher,
    kubernetes: Cluster,
    server: ApiServer,
    status: int,
    error: type[Exception],
    said: str,
) -> None:
    answer = refusal(status, "exceeded quota")
    server.reply = lambda asked: answer if asked.method == "POST" else kubernetes(asked)
    with pytest.raises(error, match=said):
        launcher.submit(request())


def test_a_cluster_without_kuberay_is_told_so(
    launcher: KubeRayLauncher, kubernetes: Cluster
) -> None:
    kubernetes.refuse = refusal(404, "404 page not found")
    with pytest.raises(LaunchError, match=r"has no RayJobs: .*page not found; are the namespace"):
        launcher.submit(request())


def test_pods_that_may_not_be_listed_are_no_answer(
    launcher: KubeRayLauncher, kubernetes: Cluster, server: ApiServer
) -> None:
    launcher.submit(request())
    denied = refusal(403, "pods is forbidden")
    server.reply = lambda asked: denied if asked.path.endswith("/pods") else kubernetes(asked)
    for look in (lambda: launcher.poll(ID), lambda: launcher.cancel(ID, 0.0)):
        with pytest.raises(LauncherUnavailable, match="pods is forbidden"):
            look()


def test_g09_an_overdue_start_fails_though_events_may_not_be_read(
    kubernetes: Cluster, server: ApiServer, jobs_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    denied = refusal(403, "events is forbidden")
    server.reply = lambda asked: denied if asked.path.endswith("/events") else kubernetes(asked)
    config = cluster(kubeconfig=str(server.kubeconfig), namespace="ns", startup_seconds=1)
    launcher = config.open(Site(jobs_dir=jobs_dir))
    try:
        launcher.submit(request())  # the RayJob says that it was made in January
        seen = launcher.poll(ID)
    finally:
        launcher.close()
    assert (seen.phase, seen.reason) == (Phase.EXITED, Reason.LAUNCH_FAILED)
    assert "events is forbidden" in caplog.text


def test_g11_a_lost_head_is_an_end_that_stays(
    launcher: KubeRayLauncher,
    kubernetes: Cluster,
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "FRESH_SECONDS", 0.0)  # each look asks the server
    launcher.submit(request())
    kubernetes.rayjobs[NAME]["status"] = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
    kubernetes.pods = [pod("uid-head")]
    record.path.mkdir(parents=True)
    (record.path / "head").write_text("uid-head\n")
    assert launcher.poll(ID).phase is Phase.RUNNING
    kubernetes.pods = [pod("uid-new-head")]
    lost = launcher.poll(ID)
    assert (lost.phase, lost.reason, lost.leftovers) == (Phase.EXITED, Reason.NODE_FAILURE, 2)
    launcher.cancel(ID, 0.0)
    again = launcher.poll(ID)
    assert (again.reason, again.leftovers) == (Reason.NODE_FAILURE, 0)
    assert again.evidence == lost.evidence


def test_what_is_not_understood_is_no_end(
    launcher: KubeRayLauncher, kubernetes: Cluster, record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    launcher.submit(request())
    kubernetes.rayjobs[NAME]["status"] = {"jobDeploymentStatus": "Levitating"}
    with caplog.at_level(logging.ERROR), pytest.raises(LauncherUnavailable, match="Levitating"):
        launcher.poll(ID)
    assert record.verdict() is None


def test_a_watch_has_an_age(launcher: KubeRayLauncher) -> None:
    assert launcher.watch_age_seconds is None
    launcher.poll(ID)
    while launcher.watch_age_seconds is None:
        launcher.poll(ID)
    assert launcher.watch_age_seconds < 30


def test_a_preview_starts_nothing(launcher: KubeRayLauncher, server: ApiServer) -> None:
    shown = launcher.preview(request())
    assert shown is not None
    assert (shown.kind, NAME in shown.text) == ("rayjob", True)
    assert server.asked == []
