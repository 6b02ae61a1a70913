"""What `planish watch` says about an event."""

from typing import Any

import pytest

from service.api.resources import EventResource
from service.cli.watching import describe
from service.spec.layout import Layout


def started(**data: Any) -> EventResource:
    whole = {"layout": Layout().to_json(), "device": "cuda", "resumed_from_step": None} | data
    return EventResource(
        id=1, job_id="job-1", time=0.0, attempt=2, kind="started", step=None, data=whole
    )


@pytest.mark.parametrize(
    ("layout", "shown"),
    [
        (Layout(dp=2), "tp1 pp1 dp2"),
        (Layout(tp=2, sequence_parallel=True), "tp2 pp1 dp1 sp"),
        (Layout(pp=2, pipeline_layers=(3, 5)), "tp1 pp2 dp1 layers3-5"),
    ],
)
def test_a_start_shows_its_layout_as_the_list_of_jobs_does(layout: Layout, shown: str) -> None:
    event = started(layout=layout.to_json())
    assert describe(event) == f"attempt 2 started: {shown} on cuda"


def test_a_start_says_after_which_step_it_goes_on() -> None:
    assert describe(started(resumed_from_step=0)).endswith(" on cuda, goes on after step 0")
