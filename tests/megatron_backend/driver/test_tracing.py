"""Spans of a driver that runs for real: none unless wanted, and no job suffers from them."""

import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.spec.spans import SpanName
from tests.megatron_backend.driver import tiny_job
from tests.otlp_receiver import open_receiver

pytestmark = pytest.mark.long

PARENT = "b" * 16
TRACEPARENT = f"00-{'a' * 32}-{PARENT}-01"
LOST = "traces are not taken at"


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


def test_by_default_no_process_of_a_job_imports_it(tmp_path: Path) -> None:
    folder = tiny_job.write_job(tmp_path / "job", checkpoint={"export": False})
    assert tiny_job.start(folder, environment={"PYTHONPROFILEIMPORTTIME": "1"}).wait() == 0
    imports = [line for line in tiny_job.log_text(folder).splitlines() if "import time:" in line]
    assert any("megatron_backend.tracing" in line for line in imports)
    assert any("megatron.core" in line for line in imports)  # the rank's are among them
    # Ray imports the SDK, to see whether its dashboard could run; nobody imports what sends spans.
    ours = ("service.spec.otlp", "opentelemetry.exporter.otlp")
    assert not [line for line in imports if line.split("|")[-1].strip().startswith(ours)]


def test_a_receiver_that_never_answers_costs_one_line(tmp_path: Path, silent: str) -> None:
    folder = tiny_job.write_job(tmp_path / "job", parallel={"dp": 2})
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
