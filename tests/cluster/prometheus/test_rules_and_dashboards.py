"""A real Prometheus scrapes a real service: rules are well, alerts fire and resolve, and every
expression of every dashboard gives data.

The jobs' driver is the tests' own, and their events are pushed over the API as drivers do, so
that everything that a job may say is said within seconds.
"""

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from service.catalogue import Catalogue
from service.jobs import JobState
from service.spec.job_metrics import OF_STEPS, PHASES
from tests.cluster.prometheus.server import Prometheus, beside, prometheus
from tests.service.metrics.deployed import asked, expressions, rules
from tests.service.model_folders import write_model
from tests.service.running_service import RunningService, start_service
from tests.service.store.sample_jobs import context, document
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]

UNHEARD = {"planish_launcher_watch_age_seconds"}
"""Only a cluster that is watched has it."""


class Driver:
    """Pushes the events of a job's first attempt over the API."""

    def __init__(self, service: RunningService, job: str) -> None:
        self._service, self._job = service, job
        self._seq = 0

    def push(self, kind: str, data: dict[str, Any], step: int | None = None) -> None:
        self._seq += 1
        event = {"seq": self._seq, "time": time.time(), "kind": kind, "step": step, "data": data}
        attempt = self._service.settings.jobs_dir / self._job / "attempts" / "1"
        answer = self._service.anonymous.post(
            f"/v1/jobs/{self._job}/attempts/1/events",
            json={"events": [event]},
            headers={"authorization": f"Bearer {(attempt / 'token').read_text().strip()}"},
        )
        assert answer.status_code == 200, answer.text

    def step(self, number: int, **data: object) -> None:
        """Every metric that a step may have; `data` replaces some."""
        whole = dict.fromkeys(OF_STEPS, 1.0) | {f"seconds_{phase}": 0.5 for phase in PHASES}
        self.push("metrics", {**whole, **data}, number)
        self.push("progress", {"step": number, "total_steps": 100, "phase": "done"})


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    root = tmp_path_factory.mktemp("model-root")
    write_model(root / "tiny")
    running = start_service(
        tmp_path_factory.mktemp("service"),
        model_root=root,
        catalogue=Catalogue(timeout_seconds=400),
        behaviours=("wait",),
        capacity=2,
    )
    yield running
    for job in running.store.jobs.active():
        running.http.post(f"/v1/jobs/{job.id}/cancel")
        running.wait_for(job.id, JobState.CANCELLED)
    running.stop()


@pytest.fixture(scope="module")
def server(
    service: RunningService, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    config = beside(service.url.removeprefix("http://"))
    with prometheus(tmp_path_factory.mktemp("prometheus"), config) as running:
        wait_until(lambda: running.value('up{job="planish"}') == 1, "the service is scraped", 60)
        yield running


@pytest.fixture(scope="module")
def job(service: RunningService, server: Prometheus) -> tuple[str, Driver]:
    """A running job that has said all that a job can say, after Prometheus saw its zeros."""
    # Past validation, which would ask the environments, and that takes long on a busy machine.
    spec = document(
        algorithm={"type": "grpo", "group_size": 2},
        environment={"id": "tools/calculator"},
        data=None,
        training={"steps": 100},
    )
    submitted = service.store.jobs.create(context(spec), spec)[0].id
    service.wait_for(submitted, JobState.RUNNING)
    driver = Driver(service, submitted)
    driver.push("started", {"world_size": 2, "resumed_from_step": None})
    for mode in ("sampled", "greedy", "validation"):
        said = {"mode": mode, "accuracy": 0.5, "reward_mean": 0.5, "loss": 1.0}
        driver.push("evaluation", said, 0)
    driver.step(1)
    saved = {"step": 1, "seconds": 1.0, "stall_seconds": 0.5, "bytes": 1000}
    driver.push("checkpoint", saved, 1)
    wait_until(lambda: server.value("max(planish_job_step)"), "its step is scraped", 60)
    return submitted, driver


def test_the_rules_are_loaded_and_none_fails(server: Prometheus, job: tuple[str, Driver]) -> None:
    _ = job
    names = {
        rule.get("alert") or rule["record"]
        for rule in (*rules("alerts.yml"), *rules("recording.yml"))
    }
    time.sleep(3)  # every group is evaluated each second
    found = server.rules()
    assert {rule["name"] for rule in found} == names
    assert {rule["name"]: rule.get("lastError") for rule in found if rule["health"] != "ok"} == {}


def test_every_expression_of_every_dashboard_gives_data(
    server: Prometheus, job: tuple[str, Driver]
) -> None:
    _, driver = job
    steps = iter(range(2, 1000))
    silent: list[str] = []

    def all_speak() -> bool:
        driver.step(next(steps))  # rates need more than one sample
        silent[:] = [
            expression
            for expression in expressions()
            if not asked(expression) & UNHEARD and not server.query(expression)
        ]
        return not silent

    wait_until(
        all_speak,
        "every expression gives data",
        120,
        details=lambda: f"these do not: {silent}",
        pause=0.3,
    )


def test_an_alert_fires_with_its_words_and_resolves(
    server: Prometheus, job: tuple[str, Driver]
) -> None:
    name, driver = job
    driver.step(1001, loss=None)
    alert = wait_until(lambda: server.firing().get("PlanishLossNotANumber"), "it fires", 60)
    assert alert["labels"]["job_id"] == name
    assert alert["labels"]["severity"] == "warning"
    assert alert["annotations"]["summary"] == f"The loss of job {name} is not a number."
    driver.step(1002, loss=1.0)
    wait_until(lambda: "PlanishLossNotANumber" not in server.firing(), "it resolves", 60)


def test_h03_the_first_failure_is_seen_by_increase(
    service: RunningService, server: Prometheus, job: tuple[str, Driver]
) -> None:
    """It counts from the 0 that was there before."""
    _ = job
    failed = 'planish_jobs_failed_total{reason="USER_ERROR"}'
    server.wait_for_value(failed, 0)
    lost = service.submit(name="lost")["id"]
    service.wait_for(lost, JobState.RUNNING)
    attempt = service.settings.jobs_dir / lost / "attempts" / "1"
    (attempt / "outcome.json").write_text(
        '{"attempt": 1, "status": "failed", "reason": "USER_ERROR", "message": "no data"}'
    )
    (service.settings.jobs_dir / lost / "go").touch()
    service.wait_for(lost, JobState.FAILED)
    wait_until(
        lambda: (server.value(f"increase({failed}[5m])") or 0) > 0, "the first failure is seen", 60
    )


def test_h01_series_end_with_their_job(
    service: RunningService, server: Prometheus, job: tuple[str, Driver]
) -> None:
    name, _ = job
    mine = f'count({{job_id="{name}"}})'
    wait_until(lambda: (server.value(mine) or 0) > 20, "its series are there", 60)
    service.http.post(f"/v1/jobs/{name}/cancel")
    service.wait_for(name, JobState.CANCELLED)
    server.wait_until_gone(f'job_id="{name}"')
    assert name not in service.anonymous.get("/metrics").text
