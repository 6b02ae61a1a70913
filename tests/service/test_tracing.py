"""The service's spans, as a real receiver of OTLP gets them; and that there are none by default."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from service.jobs import JobState
from service.settings import Settings
from tests.otlp_receiver import Receiver, open_receiver
from tests.service.running_service import KEY, RunningService

NewService = Callable[..., RunningService]
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, CALLING_SPAN = CALLER.split("-")[1:3]
WITHOUT_EXPORTER = "import sys; sys.modules['opentelemetry.exporter.otlp'] = None\n"
SERVER_KIND = 2
ROOT = Path(__file__).parents[2]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with open_receiver() as opened:
        yield opened


def submit(service: RunningService, **headers: str) -> str:
    answer = service.http.post("/v1/jobs", json=service.job_document(), headers=headers)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def job_context(service: RunningService, job_id: str) -> dict[str, object]:
    """What the driver was given."""
    text = (service.settings.jobs_dir / job_id / "context.json").read_text()
    return dict(json.loads(text))


def test_a_job_is_part_of_its_callers_trace(new_service: NewService, receiver: Receiver) -> None:
    service = new_service(capacity=1, behaviours=("exit=3",), traces_endpoint=receiver.url)
    job_id = submit(service, traceparent=CALLER)
    service.wait_for(job_id, JobState.FAILED)
    service.stop()

    (request,) = receiver.spans(name="POST /v1/jobs")
    assert (request.trace, request.parent, request.kind) == (TRACE, CALLING_SPAN, SERVER_KIND)
    assert request.attributes["http.response.status_code"] == 201
    assert request.attributes["planish.job_id"] == job_id
    below = receiver.spans(parent=request.id)
    # It is tried again `retry.infrastructure` times, which is 3.
    assert [span.name for span in below] == ["open attempt", "submit attempt", "end attempt"] * 4
    assert {span.trace for span in below} == {TRACE}
    assert all(span.attributes["planish.job_id"] == job_id for span in below)
    assert [span.attributes["planish.attempt"] for span in below] == [
        number for number in (1, 2, 3, 4) for _ in range(3)
    ]
    ends = receiver.spans(name="end attempt")
    assert [end.attributes["planish.reason"] for end in ends] == ["WORKER_LOST"] * 4
    assert [end.attributes["planish.job_state"] for end in ends] == ["RECOVERING"] * 3 + ["FAILED"]
    assert all(span.start <= span.end for span in receiver.spans())
    assert job_context(service, job_id)["trace"] == {
        "endpoint": receiver.url,
        "traceparent": request.traceparent,
    }


def test_other_requests_are_named_after_their_route(
    new_service: NewService, receiver: Receiver
) -> None:
    service = new_service(traces_endpoint=receiver.url)
    job_id = submit(service)
    service.http.get(f"/v1/jobs/{job_id}?secret=of-a-query")
    service.http.get("/v1/jobs/no-such-job", headers={"traceparent": "of no known form"})
    service.anonymous.get("/v1/jobs")
    service.http.get(f"/nothing/here/{job_id}")
    service.http.request("BREW", "/v1/jobs")
    for path in ("/healthz", "/readyz", "/metrics"):
        service.http.get(path)
    service.stop()

    found = [
        (span.name, span.attributes["http.response.status_code"], span.parent, span.failed)
        for span in receiver.spans(kind=SERVER_KIND)
    ]
    assert found == [
        ("POST /v1/files", 201, "", False),
        ("POST /v1/jobs", 201, "", False),
        ("GET /v1/jobs/{job}", 200, "", False),
        ("GET /v1/jobs/{job}", 404, "", False),
        ("GET /v1/jobs", 401, "", False),
        ("GET unmatched", 404, "", False),
        ("_OTHER /v1/jobs", 405, "", False),
    ]
    shown = receiver.spans(name="GET /v1/jobs/{job}")[0]
    assert shown.attributes["planish.path.job"] == job_id
    assert shown.attributes["planish.request_id"].startswith("req_")
    everything = b"".join(receiver.bodies)
    assert all(secret.encode() not in everything for secret in (KEY, "of-a-query", "rows.jsonl"))


def test_a_restart_between_submit_and_start_keeps_the_trace(
    new_service: NewService, receiver: Receiver
) -> None:
    first = new_service(traces_endpoint=receiver.url)
    job_id = submit(first, traceparent=CALLER)
    first.stop()
    (request,) = receiver.spans(name="POST /v1/jobs")
    with open_receiver() as elsewhere:
        second = new_service(capacity=1, behaviours=("succeed",), traces_endpoint=elsewhere.url)
        second.wait_for(job_id, JobState.SUCCEEDED)
        second.stop()
        below = elsewhere.spans(parent=request.id, trace=TRACE)
    assert [span.name for span in below] == ["open attempt", "submit attempt", "end attempt"]
    assert "planish.reason" not in below[-1].attributes
    # The driver sends to where the service that starts it does.
    assert job_context(second, job_id)["trace"] == {
        "endpoint": elsewhere.url,
        "traceparent": request.traceparent,
    }


def test_a_service_without_tracing_starts_drivers_without(
    new_service: NewService, receiver: Receiver
) -> None:
    first = new_service(traces_endpoint=receiver.url)
    job_id = submit(first)
    first.stop()
    second = new_service(capacity=1, behaviours=("succeed",))
    second.wait_for(job_id, JobState.SUCCEEDED)
    assert "trace" not in job_context(second, job_id)


OFF = """
import sys, tempfile
from pathlib import Path
from service.catalogue import Catalogue
from service.jobs import JobState
from tests.service.model_folders import write_model
from tests.service.running_service import start_service

with tempfile.TemporaryDirectory() as folder:
    write_model(Path(folder, "models", "tiny"))
    service = start_service(
        Path(folder, "data"), model_root=Path(folder, "models"), behaviours=("succeed",),
        catalogue=Catalogue(timeout_seconds=120), capacity=1,
    )
    answer = service.http.post(
        "/v1/jobs", json=service.job_document(), headers={"traceparent": "%s"}
    )
    job_id = answer.json()["id"]
    service.wait_for(job_id, JobState.SUCCEEDED)
    assert "trace" not in service.store.jobs.get(job_id).resolved
    assert "trace" not in (service.settings.jobs_dir / job_id / "context.json").read_text()
    assert not [name for name in answer.headers if "trace" in name]
    service.stop()
# FastAPI itself imports the API of OpenTelemetry, which sends nothing.
parts = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto", "service.spec.otlp")
print([name for name in sys.modules if name.startswith(parts)])
"""


def test_by_default_nothing_is_imported_and_nothing_written() -> None:
    run = subprocess.run(
        [sys.executable, "-c", OFF % CALLER], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_without_opentelemetry_the_command_says_what_to_install(tmp_path: Path) -> None:
    command = ["serve", "--data-dir", str(tmp_path / "data"), "--traces", "http://127.0.0.1:4318"]
    code = WITHOUT_EXPORTER + f"sys.argv[1:] = {command!r}\nfrom service.cli import main\nmain()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 2, run.stderr
    assert "pip install 'planish[tracing]'" in " ".join(run.stderr.split())
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:4318",
        "grpc://127.0.0.1:4317",
        "http://",
        "http://user:secret@collector:4318",
        "http://collector:4318/?key=secret",
    ],
)
def test_an_address_that_is_none_or_holds_a_key_is_refused(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="of an OTLP/HTTP receiver, with no key") as refused:
        Settings(data_dir=tmp_path, traces_endpoint=endpoint)
    assert "secret" not in str(refused.value)
