"""The driver's own metrics, over real HTTP."""

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_backend.driver.metrics import JobMetrics, MetricsServer
from megatron_backend.driver.recorder import SpoolRecorder
from service.spec import JobContext, JobSpec, ResolvedModel
from service.spec.driver_variables import METRICS_PORT

Labels = frozenset[tuple[str, str]]


@pytest.fixture
def context() -> JobContext:
    spec = {
        "name": "n",
        "model": {"path": "m"},
        "algorithm": {"type": "sft"},
        "data": {"train": "/rows.jsonl"},
    }
    model = ResolvedModel(kind="huggingface", config={}, tokenizer="m", weights="m")
    return JobContext(job_id="job-1", spec=JobSpec.model_validate(spec), dp=1, model=model)


@pytest.fixture
def server(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsServer]:
    monkeypatch.setenv(METRICS_PORT, "0")
    opened = MetricsServer(JobMetrics(context))
    yield opened
    opened.close()


def scrape(server: MetricsServer) -> dict[tuple[str, Labels], float]:
    text = httpx.get(f"http://127.0.0.1:{server.port}/metrics", trust_env=False).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_is_recorded_is_served(
    context: JobContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `run_attempt` puts them together; there is no service, and none is needed."""
    monkeypatch.setenv(METRICS_PORT, "0")
    (tmp_path / "attempts" / "1").mkdir(parents=True)
    metrics = JobMetrics(context)
    server = MetricsServer(metrics)
    recorder = SpoolRecorder(tmp_path, job_id="job-1", attempt=1, on_event=metrics.take)
    labels = frozenset({"job_id": "job-1", "algorithm": "sft", "cluster": "local"}.items())
    assert ("planish_job_loss", labels) not in scrape(server)
    recorder.record("metrics", {"loss": 0.5, "tokens": 10, "seconds_update": 2.0}, step=1)
    found = scrape(server)
    assert found["planish_job_loss", labels] == 0.5
    assert found["planish_job_tokens_per_second", labels] == 5.0
    assert found["planish_job_phase_seconds", labels | {("phase", "update")}] == 2.0
    assert found["process_resident_memory_bytes", frozenset()] > 0
    recorder.close()
    server.close()


def test_it_is_off_unless_it_is_asked_for(
    context: JobContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(METRICS_PORT, raising=False)
    server = MetricsServer(JobMetrics(context))
    assert server.port is None
    server.close()


def test_it_ends_with_the_driver(server: MetricsServer) -> None:
    port = server.port
    server.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False)


@pytest.mark.parametrize("port", ["taken", "many", "70000", "-1"])
def test_a_port_that_cannot_be_had_ends_no_job(
    context: JobContext,
    port: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as other, caplog.at_level(logging.WARNING, logger="planish"):
        other.bind(("0.0.0.0", 0))
        other.listen()
        wanted = str(other.getsockname()[1]) if port == "taken" else port
        monkeypatch.setenv(METRICS_PORT, wanted)
        server = MetricsServer(JobMetrics(context))
    assert server.port is None
    assert f"{METRICS_PORT}={wanted}: no metrics are served" in caplog.text
    server.close()
