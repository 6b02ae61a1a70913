"""A job's trace, from a caller's request to the calls of its ranks: one tree."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.spec.spans import SpanName
from tests.end_to_end.conftest import sft_job
from tests.end_to_end.service_process import ServiceProcess
from tests.otlp_receiver import Received, Receiver, open_receiver
from tests.ports import free_port

pytestmark = pytest.mark.long

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, CALLING_SPAN = CALLER.split("-")[1:3]
RANKS, STEPS = 2, 4
REQUEST = "POST /v1/jobs"
PARENTS = {
    SpanName.OPEN: {REQUEST},
    SpanName.SUBMIT: {REQUEST},
    SpanName.END: {REQUEST},
    SpanName.ATTEMPT: {REQUEST},
    SpanName.CHECKPOINTS: {SpanName.ATTEMPT},
    SpanName.CLUSTER: {SpanName.ATTEMPT},
    SpanName.DATA: {SpanName.ATTEMPT},
    SpanName.MODEL: {SpanName.ATTEMPT},
    SpanName.STEP: {SpanName.ATTEMPT},
    SpanName.EXPORT: {SpanName.ATTEMPT},
    SpanName.EVALUATION: {SpanName.ATTEMPT, SpanName.STEP},
    SpanName.CHECKPOINT: {SpanName.STEP},
    "data": {SpanName.STEP},
    "update": {SpanName.STEP},
    "setup": {SpanName.MODEL},
    "train_step": {"update"},
    "evaluate_loss": {SpanName.EVALUATION},
    "tied_difference": {SpanName.STEP},
    "begin_save": {SpanName.CHECKPOINT},
    "save_result": {SpanName.CHECKPOINT, SpanName.STEP, SpanName.ATTEMPT, "data", "update"},
    "export_hf": {SpanName.EXPORT},
    "check_export": {SpanName.EXPORT},
    "logits": {SpanName.EXPORT},
}
"""Every span that such a job makes, and what it may stand below."""
OF_RANKS = ("setup", "train_step", "begin_save")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with open_receiver() as opened:
        yield opened


@pytest.fixture
def traced(tmp_path: Path, model_root: Path, receiver: Receiver) -> Iterator[ServiceProcess]:
    options = ("--traces", receiver.url)
    running = ServiceProcess(tmp_path, port=free_port(), model_root=model_root, options=options)
    running.start()
    yield running
    running.stop()


def test_one_tree_from_the_request_to_the_ranks(
    traced: ServiceProcess, receiver: Receiver, model_root: Path, rows: Path
) -> None:
    with traced.client() as client:
        file = client.upload(rows)
        job = sft_job(
            model_root,
            file.id,
            name="traced",
            data={"train": file.id, "validation": file.id},
            parallel={"dp": RANKS},
            training={"steps": STEPS, "global_batch_size": 10, "max_length": 64},
            evaluation={"every_steps": 2},
            checkpoint={"every_steps": 2, "export": True},
        )
        headers = {"authorization": f"Bearer {traced.key}", "traceparent": CALLER}
        answer = httpx.post(f"{traced.url}/v1/jobs", json=job, headers=headers, timeout=60)
        assert answer.status_code == 201, answer.text
        job_id = answer.json()["id"]
        for _ in client.events(job_id):
            pass  # to the end
        ended = client.job(job_id)
    assert ended.state.value == "SUCCEEDED", ended.message
    traced.stop()  # which sends what is left

    spans = receiver.spans(trace=TRACE)
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans), "an id was given twice"
    assert [span.name for span in spans if span.parent not in by_id] == [REQUEST]
    assert receiver.spans(name=REQUEST)[0].parent == CALLING_SPAN
    assert not any(span.failed for span in spans)
    assert_names_stand_below_each_other(by_id)
    assert_times_are_sane(by_id)
    assert_steps_are_whole(spans)
    log = (traced.data_dir / "jobs" / job_id / "attempts" / "1" / "log").read_text()
    assert "traces are not taken" not in log
    assert "opentelemetry" not in log


def assert_names_stand_below_each_other(by_id: dict[str, Received]) -> None:
    below = [span for span in by_id.values() if span.parent in by_id]
    wrong = [
        (span.name, by_id[span.parent].name)
        for span in below
        if by_id[span.parent].name not in PARENTS[span.name]
    ]
    assert not wrong
    assert {*SpanName, *OF_RANKS} <= {span.name for span in below}


def assert_times_are_sane(by_id: dict[str, Received]) -> None:
    """All on one machine. Only what a request sets off comes after it."""
    for span in by_id.values():
        assert span.start <= span.end
        parent = by_id.get(span.parent)
        if parent is not None:
            assert parent.start <= span.start, (parent.name, span.name)
            if parent.name != REQUEST:
                assert span.end <= parent.end, (parent.name, span.name)


def assert_steps_are_whole(spans: list[Received]) -> None:
    steps = [span for span in spans if span.name == SpanName.STEP]
    assert [step.attributes["planish.step"] for step in steps] == list(range(1, STEPS + 1))
    (driver,) = {step.pid for step in steps}
    for step in steps:
        (update,) = [s for s in spans if s.parent == step.id and s.name == "update"]
        calls = [span for span in spans if span.parent == update.id]
        assert [call.name for call in calls] == ["train_step"] * RANKS
        assert {call.attributes["planish.rank"] for call in calls} == set(range(RANKS))
        assert all(c.attributes["planish.dp"] == c.attributes["planish.rank"] for c in calls)
        assert all(c.attributes["planish.tp"] == 0 for c in calls)
        assert all(0 <= c.attributes["planish.own_seconds"] <= c.end - c.start for c in calls)
        assert len({driver, *(call.pid for call in calls)}) == 1 + RANKS
