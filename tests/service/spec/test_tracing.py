"""What is done to the SDK to have it beside a job, and the page about it."""

import random
import re
import time
from pathlib import Path

import pytest

from service.spec.otlp import Tracer, parent, traceparent
from service.spec.spans import SpanName
from tests.otlp_receiver import open_receiver

ROOT = Path(__file__).parents[3]
NOBODY = "http://127.0.0.1:9"


def test_spans_get_there_with_their_parents() -> None:
    with open_receiver() as receiver:
        tracer = Tracer(receiver.url, "planish-test", pytest.fail)
        with tracer.span("outer", {"planish.step": 1}, under=parent(None)):
            place = traceparent()
            with pytest.raises(KeyError), tracer.span("inner", {}):
                raise KeyError("what a user sent")
        with tracer.span("elsewhere", {}, under=parent(place)):
            pass
        tracer.close(5.0)
        (outer,) = receiver.spans(name="outer")
        inner, elsewhere = receiver.spans(parent=outer.id)
    assert (outer.parent, outer.failed, dict(outer.attributes)) == ("", False, {"planish.step": 1})
    assert (inner.name, elsewhere.name) == ("inner", "elsewhere")
    assert inner.failed
    assert dict(inner.attributes) == {"error.type": "KeyError"}
    assert {outer.trace, inner.trace} == {elsewhere.trace}
    assert b"what a user sent" not in b"".join(receiver.bodies)


def test_a_receiver_that_is_away_is_told_once_and_waited_for_no_longer_than_said(
    capfd: pytest.CaptureFixture[str],
) -> None:
    told: list[str] = []
    tracer = Tracer(NOBODY, "planish-test", told.append)
    started = time.monotonic()
    for number in range(10_000):  # the queue takes 2048
        with tracer.span("lost", {"planish.step": number}):
            pass
    assert time.monotonic() - started < 20
    started = time.monotonic()
    tracer.flush(0.2)
    tracer.close(0.3)
    assert time.monotonic() - started < 2
    assert len(told) == 1
    assert told[0].startswith(f"traces are not taken at {NOBODY} (")
    assert "\n" not in told[0]
    assert capfd.readouterr() == ("", "")


def test_no_seed_decides_ids_and_ids_take_no_draw() -> None:
    ids = []
    with open_receiver() as receiver:
        for _ in range(2):
            tracer = Tracer(receiver.url, "planish-test", pytest.fail)
            random.seed(1)
            before = random.getstate()
            with tracer.span("seeded", {}, under=parent(None)):
                ids.append(traceparent())
            assert random.getstate() == before
            tracer.close(5.0)
    assert ids[0] != ids[1]


def test_the_standard_variable_samples_whole_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with open_receiver() as receiver:
        tracer = Tracer(receiver.url, "planish-test", pytest.fail)
        with tracer.span("left out", {}, under=parent(None)):
            place = traceparent()
        monkeypatch.delenv("OTEL_TRACES_SAMPLER")
        driver = Tracer(receiver.url, "planish-test", pytest.fail)
        with driver.span("left out too", {}, under=parent(place)):
            pass
        with driver.span("a caller's own choice", {}, under=parent(f"00-{'a' * 32}-{'b' * 16}-01")):
            pass
        for each in (tracer, driver):
            each.close(5.0)
        assert place is not None
        assert place.endswith("-00")
        assert [span.name for span in receiver.spans()] == ["a caller's own choice"]


def test_the_page_lists_every_span() -> None:
    page = (ROOT / "docs" / "tracing.md").read_text()
    table = page.split("## Spans")[1].split("\n## ")[0]
    named = re.findall(r"^\| `([^`]+)` \|", table, flags=re.M)
    assert set(SpanName) <= set(named)
    # Spans without a name of their own: a request, the phases (one row), the calls of a rank.
    assert set(named) - set(SpanName) == {"METHOD /route", "PHASE", "CALL"}
