"""Calls to clusters are counted, whatever comes of them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from service.jobs import JobState
from service.launchers import LaunchError, LauncherUnavailable, LaunchRequest
from service.launchers.local import LocalLauncher
from service.metrics.reconciling import ReconcilerMetrics
from service.reconciler import Reconciler
from service.store import Store
from tests.service.reconciler.services import DRIVER
from tests.service.store.running_jobs import new_job


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path}/planish.db")
    yield opened
    opened.close()


class Away(LocalLauncher):
    """A cluster that answers `submit` with an error."""

    error: Exception = LauncherUnavailable("the login node does not answer")

    def submit(self, request: LaunchRequest) -> None:  # noqa: ARG002
        raise self.error


def swept(store: Store, folder: Path, error: Exception) -> CollectorRegistry:
    """What was counted in one round over a new job on a cluster that is away."""
    registry = CollectorRegistry()
    metrics = ReconcilerMetrics(registry)
    metrics.declare(["local"])
    launcher = Away(folder / "jobs", capacity=1, command=[sys.executable, str(DRIVER)])
    launcher.error = error
    reconciler = Reconciler(
        store, {"local": launcher}, folder / "jobs", "http://127.0.0.1:1", observer=metrics
    )
    reconciler.sweep()
    return registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"cluster": "local", **labels})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (LauncherUnavailable("the login node does not answer"), "unavailable"),
        (LaunchError("no such partition"), "refused"),
        (RuntimeError("a bug of ours"), "other"),
    ],
    ids=["unavailable", "refused", "other"],
)
def test_a_call_that_goes_wrong_is_counted_by_how(
    store: Store, tmp_path: Path, error: Exception, kind: str
) -> None:
    job = new_job(store)
    registry = swept(store, tmp_path, error)
    assert store.jobs.get(job.id).state in (JobState.STARTING, JobState.FAILED, JobState.RECOVERING)
    wrong = {
        other: value(registry, "planish_launcher_errors_total", call="submit", error=other)
        for other in ("unavailable", "refused", "other")
    }
    assert wrong == {other: float(other == kind) for other in wrong}
    assert value(registry, "planish_launcher_call_seconds_count", call="submit") == 1
    assert value(registry, "planish_queue_seconds_count") == 1
    assert registry.get_sample_value("planish_reconcile_round_seconds_count") == 1


def test_a_call_that_goes_well_is_no_error(store: Store, tmp_path: Path) -> None:
    new_job(store)
    registry = swept(store, tmp_path, LauncherUnavailable("away"))
    polled = value(registry, "planish_launcher_call_seconds_count", call="poll")
    assert polled is not None
    assert polled > 0
    assert value(registry, "planish_launcher_errors_total", call="poll", error="unavailable") == 0
