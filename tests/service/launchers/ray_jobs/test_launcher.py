"""The launcher against a small HTTP server that answers as Ray 2.60 was seen to, faults and all.

The real one is a site of `tests/cluster/conformance`.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from service.launchers import LaunchError, LauncherUnavailable, LaunchRequest, Phase, Site
from service.launchers.ray_jobs.config import RayJobsCluster
from service.launchers.ray_jobs.launcher import RayJobsLauncher
from service.spec import Reason

NewRequest = Callable[[], LaunchRequest]


class Ray(ThreadingHTTPServer):
    """Jobs by id, and what to answer instead."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.posts: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.fault: tuple[int, str] | None = None
        self.loses_answers = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Ray

    def do_GET(self) -> None:
        name = self.path.rsplit("/", 1)[1]
        if self._faulty():
            return
        if name in self.server.jobs:
            self._answer(200, json.dumps(self.server.jobs[name]))
        else:
            self._answer(404, f"Job {name} does not exist")

    def do_POST(self) -> None:
        length = int(self.headers["content-length"] or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        if self._faulty():
            return
        if body is None:
            name = self.path.split("/")[-2]
            known = name in self.server.jobs
            self._answer(200 if known else 404, "{}" if known else f"Job {name} does not exist")
            return
        self.server.posts.append(body)
        name = body["submission_id"]
        if name in self.server.jobs:
            self._answer(500, f"Traceback\nValueError: Job with submission_id {name} exists")
            return
        self.server.jobs[name] = {"status": "RUNNING", "submission_id": name}
        self._answer(500 if self.server.loses_answers else 200, "{}")

    def log_message(self, *_: object) -> None:
        pass

    def _faulty(self) -> bool:
        self.server.tokens.add(self.headers["authorization"])
        if self.server.fault is not None:
            self._answer(*self.server.fault)
        return self.server.fault is not None

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def ray() -> Iterator[Ray]:
    with Ray() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def launcher(ray: Ray, jobs_dir: Path) -> Iterator[RayJobsLauncher]:
    opened = RayJobsCluster(type="ray_jobs", address=ray.url).open(Site(jobs_dir=jobs_dir))
    yield opened
    opened.close()


def taker(request: LaunchRequest) -> str:
    return os.readlink(request.job_dir / "attempts/1/taken")


def takes(request: LaunchRequest, who: str) -> None:
    folder = request.job_dir / "attempts/1"
    folder.mkdir(parents=True)
    os.symlink(who, folder / "taken")


def test_g15_a_second_submission_finds_the_first(
    ray: Ray, launcher: RayJobsLauncher, new_request: NewRequest
) -> None:
    request = new_request()
    name = launcher.identify(request.job_id, 1)
    assert launcher.poll(name).phase is Phase.UNKNOWN
    launcher.submit(request)
    launcher.submit(request)
    assert [post["submission_id"] for post in ray.posts] == [name]
    assert launcher.poll(name).phase is Phase.RUNNING


def test_g15_an_id_that_another_took_a_moment_before_is_found_behind_the_500(
    ray: Ray, launcher: RayJobsLauncher, new_request: NewRequest
) -> None:
    request = new_request()
    ray.loses_answers = True  # as seen by the second of two that submit at the same instant
    launcher.submit(request)
    assert launcher.poll(launcher.identify(request.job_id, 1)).phase is Phase.RUNNING


def test_a_request_that_ray_refuses_was_not_started(
    ray: Ray, launcher: RayJobsLauncher, new_request: NewRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher._client, "job", lambda _: None)
    ray.fault = (400, "Traceback (most recent call last):\nTypeError: entrypoint must be a string")
    with pytest.raises(LaunchError, match=r"^Ray refuses the job: TypeError: entrypoint"):
        launcher.submit(new_request())


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ((500, "No available agent to submit job"), "500: No available agent"),
        ((502, "<html>"), "502"),
        ((401, "Unauthorized: missing token"), "token_file or token_variable"),
        ((404, "no such page /planish"), "404"),
        ((200, "<html>a portal</html>"), "no Ray dashboard"),
        ((200, "[]"), "no Ray dashboard"),
        ((200, '{"status": null}'), "no Ray dashboard"),
        ((200, '{"status": "NEWSTATE"}'), "unknown word 'NEWSTATE'"),
    ],
)
def test_g13_an_answer_that_is_none_concludes_nothing(
    ray: Ray, launcher: RayJobsLauncher, fault: tuple[int, str], words: str
) -> None:
    ray.fault = fault
    with pytest.raises(LauncherUnavailable, match=words):
        launcher.poll("planish-job-a-1")
    ray.fault = None
    assert launcher.poll("planish-job-a-1").phase is Phase.UNKNOWN


def test_a_server_that_is_away_concludes_nothing(jobs_dir: Path, new_request: NewRequest) -> None:
    config = RayJobsCluster(type="ray_jobs", address="http://127.0.0.1:1")
    launcher = config.open(Site(jobs_dir=jobs_dir))
    request = new_request()
    name = launcher.identify(request.job_id, 1)
    for call in (
        lambda: launcher.submit(request),
        lambda: launcher.poll(name),
        lambda: launcher.cancel(name, 0.0),
    ):
        with pytest.raises(LauncherUnavailable, match=r"127\.0\.0\.1:1 does not answer"):
            call()
    assert taker(request) == "nobody"  # what was asked for holds, whether Ray was told or not
    launcher.close()


def test_a_stopped_job_that_stays_pending_has_ended_and_does_nothing_when_it_starts(
    ray: Ray, launcher: RayJobsLauncher, new_request: NewRequest
) -> None:
    request = new_request()
    launcher.submit(request)
    name = launcher.identify(request.job_id, 1)
    ray.jobs[name]["status"] = "PENDING"
    assert launcher.poll(name).phase is Phase.QUEUED
    launcher.cancel(name, 0.0)
    for late in ("PENDING", "RUNNING"):  # an end is for good, whatever Ray makes of it
        ray.jobs[name]["status"] = late
        assert launcher.poll(name).phase is Phase.EXITED
    assert taker(request) == "nobody"


def test_an_attempt_that_was_shut_out_is_not_submitted(
    ray: Ray, launcher: RayJobsLauncher, new_request: NewRequest
) -> None:
    request = new_request()
    name = launcher.identify(request.job_id, 1)
    launcher.cancel(name, 0.0)
    launcher.submit(request)
    assert ray.posts == []
    assert launcher.poll(name).phase is Phase.EXITED


def test_g11_a_ray_that_forgot_the_job_has_lost_it(
    ray: Ray, launcher: RayJobsLauncher, new_request: NewRequest
) -> None:
    request = new_request()
    takes(request, "driver")
    name = launcher.identify(request.job_id, 1)
    seen = launcher.poll(name)
    assert (seen.phase, seen.reason) == (Phase.EXITED, Reason.NODE_FAILURE)
    launcher.submit(request)
    assert ray.posts == []


def test_a_driver_gets_its_grace_before_it_is_killed(
    ray: Ray, launcher: RayJobsLauncher, new_request: NewRequest
) -> None:
    request = new_request()
    launcher.submit(request)
    takes(request, "driver")
    name = launcher.identify(request.job_id, 1)
    launcher.cancel(name, 5.0)
    assert not (request.job_dir / "attempts/1/kill").exists()
    launcher.cancel(name, 0.0)
    assert (request.job_dir / "attempts/1/kill").exists()
    assert taker(request) == "driver"
    assert set(ray.jobs) == {name}


def test_g25_the_token_is_sent_and_shown_nowhere(
    ray: Ray, jobs_dir: Path, new_request: NewRequest, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    config = RayJobsCluster(type="ray_jobs", address=ray.url + "/", token_file=path)
    launcher = config.open(Site(jobs_dir=jobs_dir))
    with pytest.raises(LauncherUnavailable, match="the token of"):
        launcher.poll("planish-job-a-1")
    for secret in ("first-secret", "second-secret"):
        path.write_text(secret + "\n")
        request = new_request()
        launcher.submit(request)
        assert secret not in launcher.preview(request).text
    assert ray.tokens == {"Bearer first-secret", "Bearer second-secret"}
    assert "secret" not in json.dumps(ray.posts)
    launcher.close()


def test_a_job_for_another_kind_of_cluster_is_refused(
    launcher: RayJobsLauncher, new_request: NewRequest
) -> None:
    spec = new_request().context.spec
    assert list(launcher.check(spec)) == []
    other = spec.model_copy(
        update={"resources": spec.resources.model_copy(update={"slurm": object()})}
    )
    (problem,) = launcher.check(other)
    assert problem.field == "resources.slurm"
