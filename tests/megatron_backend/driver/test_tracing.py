"""Spans of a driver that runs for real: none unless wanted, and no job suffers from them."""

import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.spec.spans import SpanName
from tests.megatron_backend.driver import tiny_job
from tests.otlp_receiver import open_receiver

pytestmark = pytest.mark.long

PARENT = "b" * 16
TRACEPARENT = f"00-{'a' * 32}-{PARENT}-01"
LOST = "traces are not taken at"
GRPO: dict[str, Any] = {
    "algorithm": {"type": "grpo", "group_size": 4, "kl_coef": 0.1},
    "data": None,
    "environment": {"id": "reasoning_gym/chain_sum", "config": {"max_terms": 2, "max_digits": 1}},
    "rollout": {"max_new_tokens": 6},
    "training": {"steps": 2, "global_batch_size": 8, "max_length": 128},
    "evaluation": {"items": 4, "every_steps": 2},
    "checkpoint": {"export": False},
}


def trace(folder: Path, endpoint: str) -> None:
    """Gives a job a place in a trace, as the service does."""
    path = folder / "context.json"
    document = json.loads(path.read_text())
    assert "trace" not in document
    document["trace"] = {"endpoint": endpoint, "traceparent": TRACEPARENT}
    path.write_text(json.dumps(document))


@pytest.fixture
def silent() -> Iterator[str]:
    """A receiver that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_receiver_that_never_answers_costs_one_line(tmp_path: Path, silent: str) -> None:
    folder = tiny_job.write_job(tmp_path / "job", checkpoint={"export": False})
    trace(folder, silent)
    assert tiny_job.start(folder).wait() == 0
    assert tiny_job.outcome(folder).status == "succeeded"
    text = tiny_job.log_text(folder)
    assert text.count(LOST) == 1
    assert not [word for word in ("opentelemetry", "urllib3", "Traceback") if word in text]


def test_sigterm_sends_the_last_spans_of_all_processes(tmp_path: Path) -> None:
    folder = tiny_job.write_job(
        tmp_path / "job",
        parallel={"dp": 2},
        training={"steps": 5000, "global_batch_size": 6, "max_length": 16},
    )
    with open_receiver() as receiver:
        trace(folder, receiver.url)
        driver = tiny_job.start(folder)
        tiny_job.wait_for(lambda: len(tiny_job.events(folder, kind="metrics")) > 10)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait() == 1
        gone = time.time()
        (attempt,) = receiver.spans(parent=PARENT)
        steps = receiver.spans(name=SpanName.STEP)
        calls = receiver.spans(name="train_step")
    assert attempt.name == SpanName.ATTEMPT
    assert (attempt.failed, attempt.attributes["planish.reason"]) == (True, "PREEMPTED")
    assert gone - attempt.end < 30
    taken = len(tiny_job.events(folder, kind="metrics"))
    assert [step.attributes["planish.step"] for step in steps] == list(range(1, taken + 1))
    assert len(calls) == 2 * taken
    assert LOST not in tiny_job.log_text(folder)


def write_grpo(folder: Path) -> Path:
    """A job that samples, of a tiny model with room for 128 tokens."""
    tiny_job.write_job(folder, **GRPO)
    path = folder / "context.json"
    document = json.loads(path.read_text())
    document["model"]["config"]["max_position_embeddings"] = 128
    path.write_text(json.dumps(document))
    return folder


def numbers(folder: Path) -> list[dict[str, Any]]:
    """All that a job has measured, but times."""
    return [
        {name: value for name, value in event.data.items() if "second" not in name}
        for event in tiny_job.events(folder)
        if event.kind in ("metrics", "evaluation", "sample")
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job without a trace, which told what it imported."""
    folder = write_grpo(tmp_path_factory.mktemp("jobs") / "plain")
    driver = tiny_job.start(folder, environment={"PYTHONPROFILEIMPORTTIME": "1"})
    assert driver.wait() == 0, tiny_job.log_text(folder)
    return folder


def test_by_default_no_process_of_a_job_imports_it(plain: Path) -> None:
    imports = [line for line in tiny_job.log_text(plain).splitlines() if "import time:" in line]
    assert any("megatron_backend.tracing" in line for line in imports)
    assert any("megatron.core" in line for line in imports)  # the rank's are among them
    # Ray imports the SDK, to see whether its dashboard could run; nobody imports what sends spans.
    ours = ("service.spec.otlp", "opentelemetry.exporter.otlp")
    assert not [line for line in imports if line.split("|")[-1].strip().startswith(ours)]


def test_a_job_that_samples_has_its_phases_and_the_same_numbers(
    plain: Path, tmp_path: Path
) -> None:
    traced = write_grpo(tmp_path / "traced")
    with open_receiver() as receiver:
        trace(traced, receiver.url)
        assert tiny_job.start(traced).wait() == 0, tiny_job.log_text(traced)
        spans = {span.id: span for span in receiver.spans()}
    assert numbers(traced) == numbers(plain)
    assert len(numbers(traced)) > 2
    found = {(spans[s.parent].name, s.name) for s in spans.values() if s.parent != PARENT}
    phases = ("rollout", "reward", "logprobs", "advantage", "update", "sync")
    assert {(SpanName.STEP, phase) for phase in phases} <= found
    assert {
        ("rollout", "generate"),
        ("logprobs", "log_probs"),
        ("update", "train_step"),
        ("sync", "sync_weights"),
        (SpanName.EVALUATION, "generate"),
        (SpanName.MODEL, "setup_generation"),
    } <= found
