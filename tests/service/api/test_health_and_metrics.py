"""Health, and the metrics' promises: H01 (bounded series), H03 (there before the first time)."""

import errno
import secrets
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.app import api_routes
from service.catalogue import Catalogue, CatalogueUnavailable
from service.jobs import JobState
from service.spec import Reason, algorithm_specs
from tests.service.running_service import RunningService
from tests.waiting import wait_until

NewService = Callable[..., RunningService]


def samples(service: RunningService) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = service.anonymous.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_h01_random_paths_names_and_methods_make_no_series(new_service: NewService) -> None:
    service = new_service()
    warm_up = ["/v1/jobs/x", "/v1/jobs/x/events", "/random", "/metrics"]
    for path in warm_up:
        service.http.get(path)
    service.http.request("BREW", "/v1/jobs")
    before = samples(service).keys()
    for _ in range(15):
        name = secrets.token_hex(8)
        service.store_job(f"j{name}")
        for path in (f"/{name}", f"/v1/{name}/x", f"/v1/jobs/{name}", f"/v1/jobs/{name}/events"):
            assert service.http.get(path).status_code == 404
        service.http.request(name.upper(), "/v1/jobs")
    after = samples(service)
    assert after.keys() == before
    key = (("method", "GET"), ("route", "unmatched"), ("status", "4xx"))
    assert after["planish_http_requests_total", key] >= 30


def test_h03_counters_are_there_before_the_first_time(new_service: NewService) -> None:
    found = samples(new_service())

    def value(name: str, **labels: str) -> float:
        return found[name, tuple(sorted(labels.items()))]

    here = {"cluster": "local"}
    for state in ("SUCCEEDED", "FAILED", "CANCELLED"):
        assert value("planish_jobs_finished_total", state=state, **here) == 0
    for reason in Reason:
        assert value("planish_attempts_failed_total", reason=reason, **here) == 0
        assert value("planish_jobs_failed_total", reason=reason, **here) == 0
    for state in JobState:
        assert value("planish_jobs", state=state, **here) == 0
    for route in api_routes():
        for method in route.methods or ():
            labels = {"method": method, "route": route.path, "status": "5xx"}
            assert value("planish_http_requests_total", **labels) == 0
    for call in ("submit", "poll", "cancel"):
        labels = {"call": call, "error": "unavailable"}
        assert value("planish_launcher_errors_total", **labels, **here) == 0
    for algorithm in algorithm_specs():
        assert value("planish_training_steps_total", algorithm=algorithm, **here) == 0
    assert value("planish_queue_oldest_seconds", **here) == 0
    assert value("planish_starting_oldest_seconds", **here) == 0
    assert value("planish_reconcile_lag_seconds") < 30


def test_environments_are_there_before_their_first_episode(service: RunningService) -> None:
    name, labels = "planish_episodes_total", (("environment", "tools/calculator"),)
    wait_until(lambda: (name, labels) in samples(service), "it is declared", 300)
    assert samples(service)[name, labels] == 0


def test_jobs_and_attempts_are_counted(new_service: NewService) -> None:
    service = new_service(behaviours=("fail=USER_ERROR",), capacity=1)
    job = service.submit()["id"]
    service.wait_for(job, JobState.FAILED)
    found = samples(service)
    here = ("cluster", "local")
    assert found["planish_jobs", (here, ("state", "FAILED"))] == 1
    assert found["planish_jobs_finished_total", (here, ("state", "FAILED"))] == 1
    assert found["planish_jobs_failed_total", (here, ("reason", "USER_ERROR"))] == 1
    assert found["planish_attempts_failed_total", (here, ("reason", "USER_ERROR"))] == 1
    assert found["planish_queue_seconds_count", (here,)] == 1
    submits = (("call", "submit"), here)
    assert found["planish_launcher_call_seconds_count", submits] == 1


def test_h01_a_jobs_series_end_with_it(new_service: NewService) -> None:
    service = new_service(behaviours=("wait",), capacity=1)
    job = service.submit(name="only-while-it-lives")["id"]
    service.wait_for(job, JobState.RUNNING)
    assert job in service.anonymous.get("/metrics").text
    service.http.post(f"/v1/jobs/{job}/cancel")
    service.wait_for(job, JobState.CANCELLED)
    text = service.anonymous.get("/metrics").text
    assert job not in text
    assert "only-while-it-lives" not in text


def test_the_age_of_the_queue_is_shown(service: RunningService) -> None:
    service.store_job()
    assert samples(service)["planish_queue_oldest_seconds", (("cluster", "local"),)] > 0


def test_a_service_is_live_at_once_and_ready_when_environments_are_known(
    service: RunningService, catalogue: Catalogue
) -> None:
    catalogue.environments()
    assert service.anonymous.get("/healthz").json() == {"status": "ok"}
    answer = service.anonymous.get("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})


def test_what_is_not_ready_is_named(new_service: NewService) -> None:
    service = new_service()
    service.context.reconciler.stop()
    answer = service.anonymous.get("/readyz")
    assert answer.status_code == 503
    assert "reconciler" in {error["field"] for error in answer.json()["errors"]}


def test_environments_that_cannot_be_asked_are_a_503(new_service: NewService) -> None:
    hopeless = Catalogue(timeout_seconds=0.001)
    with pytest.raises(CatalogueUnavailable, match="took more than"):
        hopeless.environments()
    service = new_service(catalogue=hopeless)
    assert service.http.get("/v1/environments").status_code == 503
    answer = service.anonymous.get("/readyz")
    assert "took more than" in answer.json()["detail"]
    assert service.submit()["state"] == "PENDING"  # an offline job needs no environment


class FailsOnce(Catalogue):
    failed = False

    def _call(self, command: str, request: str | None) -> tuple[str, int]:
        if self.failed:
            return super()._call(command, request)
        self.failed = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("service.catalogue._spawn", self._refuse)
            return super()._call(command, request)

    def _refuse(self, *_arguments: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "no more processes")


def test_a_service_that_nobody_asks_becomes_ready_all_the_same(
    new_service: NewService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.app._WARM_AGAIN_SECONDS", 0.01)
    catalogue = FailsOnce(timeout_seconds=300)
    service = new_service(catalogue=catalogue)
    wait_until(lambda: service.anonymous.get("/readyz").status_code == 200, "it is ready", 300)
    assert catalogue.failed


def test_what_is_installed_is_listed(service: RunningService) -> None:
    algorithms = service.http.get("/v1/algorithms").json()["data"]
    assert {a["type"]: a["online"] for a in algorithms}.items() >= {
        "grpo": True,
        "sft": False,
    }.items()
    for algorithm in algorithms:
        assert algorithm["json_schema"]["properties"]["type"]["const"] == algorithm["type"]
        assert service.http.get(f"/v1/algorithms/{algorithm['type']}").json() == algorithm
    environments = service.http.get("/v1/environments").json()["data"]
    by_id = {environment["id"]: environment for environment in environments}
    calculator = by_id["tools/calculator"]
    assert calculator["tools"][0]["function"]["name"] == "calculator"
    assert calculator["config_schema"]["properties"]["questions"]


def test_an_algorithm_says_what_it_learns_from_and_where_its_page_is(
    service: RunningService,
) -> None:
    reward_model = service.http.get("/v1/algorithms/reward_model").json()
    assert (reward_model["rows"], reward_model["head"]) == ("preference", "value")
    assert reward_model["documentation"] == "docs/algorithms/reward_model.md"
    assert reward_model["json_schema"]["properties"]["margins"]["default"] is True
    ppo = service.http.get("/v1/algorithms/ppo").json()
    assert (ppo["online"], ppo["rows"], ppo["head"]) == (True, None, "vocabulary")
    assert ppo["json_schema"]["properties"]["value_model"]


def test_an_algorithm_that_is_not_there_is_a_problem(service: RunningService) -> None:
    answer = service.http.get("/v1/algorithms/a2c")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"] == (
        "no algorithm has the id 'a2c'; GET /v1/algorithms lists them"
    )
