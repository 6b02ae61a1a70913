"""Submitting, listing (case G27), cancelling, and idempotency (case G15)."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from sqlalchemy import delete, update

from service.api.context import MAX_CHECKS_AT_ONCE
from service.catalogue import Catalogue, ConfigFault, EnvironmentInfo
from service.jobs import JobState
from service.store import tables
from tests.service.running_service import KEY, RunningService

NewService = Callable[..., RunningService]


def test_a_submitted_job_is_shown_with_its_spec_as_sent(service: RunningService) -> None:
    document = service.job_document(name="first")
    answer = service.http.post("/v1/jobs", json=document)
    assert answer.status_code == 201
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert job["spec"] == document
    assert job["resolved_spec"]["retry"] == {"infrastructure": 3, "user_error": 0}
    assert job["layout"] == {
        **dict.fromkeys(("tp", "pp", "dp", "vpp", "cp", "ep", "world_size"), 1),
        "sequence_parallel": False,
        "pipeline_layers": None,
    }
    assert (job["attempts"], job["progress"]) == ([], None)
    for reference in (job["id"], "first"):
        shown = service.http.get(f"/v1/jobs/{reference}").json()
        assert shown["id"] == job["id"]


def test_the_resolved_spec_can_be_submitted_again(service: RunningService) -> None:
    job = service.submit()
    again = service.http.post("/v1/jobs", json=job["resolved_spec"])
    assert again.status_code == 201, again.text
    assert again.json()["resolved_spec"] == job["resolved_spec"]


def test_g15_one_key_and_one_body_make_one_job(service: RunningService) -> None:
    document = service.job_document()
    answers: list[httpx.Response] = []

    def submit() -> None:
        answers.append(
            service.anonymous.post(
                "/v1/jobs",
                json=document,
                headers={"authorization": f"Bearer {KEY}", "idempotency-key": "once"},
            )
        )

    threads = [threading.Thread(target=submit, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(a.status_code for a in answers) == [200, 200, 200, 201]
    assert len({a.json()["id"] for a in answers}) == 1


def test_g15_one_key_with_another_body_is_a_conflict(service: RunningService) -> None:
    headers = {"idempotency-key": "other"}
    first = service.http.post("/v1/jobs", json=service.job_document(), headers=headers)
    second = service.http.post(
        "/v1/jobs", json=service.job_document(name="changed"), headers=headers
    )
    assert second.status_code == 409
    assert second.headers["x-should-retry"] == "false"
    assert first.json()["id"] in second.json()["detail"]


def test_a_repeated_request_is_answered_alike_though_the_world_has_changed(
    service: RunningService,
) -> None:
    document = service.job_document()
    headers = {"idempotency-key": "kept"}
    first = service.http.post("/v1/jobs", json=document, headers=headers)
    with service.store.database.writing() as connection:
        connection.execute(
            delete(tables.files).where(tables.files.c.id == document["data"]["train"])
        )
    second = service.http.post("/v1/jobs", json=document, headers=headers)
    assert (second.status_code, second.json()["id"]) == (200, first.json()["id"])


@pytest.mark.parametrize("key", ["", "x" * 256, "a b"])
def test_bad_idempotency_keys_are_refused(service: RunningService, key: str) -> None:
    answer = service.http.post(
        "/v1/jobs", json=service.job_document(), headers={"idempotency-key": key}
    )
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "idempotency-key"


def _pages(service: RunningService, by: str) -> Any:
    after: str | None = None
    while True:
        params = {"limit": 20} | ({"after": after} if after else {})
        page = service.http.get("/v1/jobs", params=params).json()
        yield page
        if not page["has_more"]:
            return
        after = page["next"] if by == "next" else page["data"][-1]["id"]


@pytest.mark.parametrize("same_time", [False, True])
def test_g27_old_jobs_come_once_each_while_new_ones_arrive(
    new_service: NewService, same_time: bool
) -> None:
    service = new_service()
    old = [service.store_job(f"old-{n}") for n in range(45)]
    jobs = tables.jobs
    if same_time:
        with service.store.database.writing() as connection:
            connection.execute(update(jobs).values(created_at=time.time()))
    seen: list[str] = []
    sizes: list[tuple[int, bool]] = []
    for page in _pages(service, "next"):
        seen += [job["id"] for job in page["data"]]
        sizes.append((len(page["data"]), page["has_more"]))
        for _ in range(3):
            service.store_job("new")
        with service.store.database.writing() as connection:
            last = page["data"][-1]["id"]
            connection.execute(delete(tables.events).where(tables.events.c.job_id == last))
            connection.execute(delete(jobs).where(jobs.c.id == last))
    assert sorted(seen) == sorted(old)
    assert sizes == [(20, True), (20, True), (5, False)]


def test_g27_the_openai_sdks_way_of_paging_works_too(new_service: NewService) -> None:
    service = new_service()
    old = [service.store_job() for _ in range(45)]
    seen = [job["id"] for page in _pages(service, "last id") for job in page["data"]]
    assert seen == old[::-1]


@pytest.mark.parametrize("limit", ["0", "-1", "10000", "many", ""])
def test_g27_bad_limits_are_refused(service: RunningService, limit: str) -> None:
    for path in ("/v1/jobs", "/v1/files"):
        answer = service.http.get(path, params={"limit": limit})
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == "limit"


@pytest.mark.parametrize("after", ["job-zzzzzzzzzzzzzzzz", "W10=", "bnVsbA==", "\u00e9", "eyJ9"])
def test_g27_bad_cursors_are_refused(service: RunningService, after: str) -> None:
    answer = service.http.get("/v1/jobs", params={"after": after})
    assert answer.status_code == 422
    assert "leave it out" in answer.json()["errors"][0]["fix"]


def test_lists_can_be_narrowed(new_service: NewService) -> None:
    service = new_service()
    first, second = service.store_job("a"), service.store_job("b")
    named = service.http.get("/v1/jobs", params={"name": "a"}).json()["data"]
    assert [job["id"] for job in named] == [first]
    service.http.post(f"/v1/jobs/{second}/cancel")
    service.wait_for(second, JobState.CANCELLED)
    params = {"state": ["CANCELLED", "FAILED"]}
    ended = service.http.get("/v1/jobs", params=params).json()["data"]
    assert [job["id"] for job in ended] == [second]
    assert service.http.get("/v1/jobs", params={"state": "GONE"}).status_code == 422


def test_a_waiting_job_is_cancelled_and_stays_so(new_service: NewService) -> None:
    service = new_service()
    job = service.submit()
    answer = service.http.post(f"/v1/jobs/{job['id']}/cancel")
    assert answer.status_code == 202
    assert answer.json()["cancel_requested"]
    service.wait_for(job["id"], JobState.CANCELLED)
    again = service.http.post(f"/v1/jobs/{job['id']}/cancel")
    assert (again.status_code, again.json()["state"]) == (200, "CANCELLED")


def test_metrics_come_by_step_and_page_by_page(new_service: NewService) -> None:
    service = new_service(behaviours=("wait",), capacity=1)
    job = service.submit()["id"]
    service.wait_for(job, JobState.RUNNING)
    folder = service.settings.jobs_dir / job
    token = (folder / "attempts" / "1" / "token").read_text()
    events = [
        {"seq": n, "time": float(n), "kind": "metrics", "step": n, "data": {"loss": 1 / n}}
        for n in range(1, 6)
    ]
    pushed = service.http.post(
        f"/v1/jobs/{job}/attempts/1/events",
        json={"events": events},
        headers={"authorization": f"Bearer {token}"},
    )
    assert pushed.json() == {"last_seq": 5}
    page = service.http.get(f"/v1/jobs/{job}/metrics", params={"limit": 3}).json()
    assert [row["step"] for row in page["data"]] == [1, 2, 3]
    assert page["has_more"]
    rest = service.http.get(f"/v1/jobs/{job}/metrics", params={"after_step": page["next"]}).json()
    assert [row["values"] for row in rest["data"]] == [{"loss": 0.25}, {"loss": 0.2}]
    (folder / "go").touch()


def test_metrics_after_a_step_that_no_database_holds_are_refused(service: RunningService) -> None:
    path = f"/v1/jobs/{service.submit()['id']}/metrics"
    assert service.http.get(path, params={"after_step": 2**63 - 1}).json()["data"] == []
    answer = service.http.get(path, params={"after_step": 2**63})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "after_step"


class _Hanging(Catalogue):
    """Its environments do not answer until they are told to."""

    def __init__(self, known: Catalogue) -> None:
        super().__init__(timeout_seconds=120)
        self._known = known
        self.go = threading.Event()

    def environments(self) -> Mapping[str, EnvironmentInfo]:
        return self._known.environments()

    def check(self, **_reference: Any) -> tuple[int | None, list[ConfigFault]]:
        self.go.wait()
        return 1, []


def test_environments_that_hang_hold_up_no_other_request(
    new_service: NewService, catalogue: Catalogue
) -> None:
    hanging = _Hanging(catalogue)
    service = new_service(catalogue=hanging)
    document = service.job_document(
        algorithm={"type": "grpo"},
        data=None,
        environment={"id": "reasoning_gym/chain_sum"},
        training={"steps": 1, "global_batch_size": 8, "max_length": 128},
        rollout={"max_new_tokens": 8},
    )
    http = httpx.Client(
        base_url=service.url,
        headers=service.http.headers,
        limits=httpx.Limits(max_connections=None),
        timeout=120,
    )
    with http, ThreadPoolExecutor(60) as pool:
        plans = [pool.submit(http.post, "/v1/jobs:plan", json=document) for _ in range(60)]
        try:
            while service.context.checking.statistics().tasks_waiting < 60 - MAX_CHECKS_AT_ONCE:
                time.sleep(0.01)
            assert http.get("/v1/jobs", timeout=30).status_code == 200
        finally:
            hanging.go.set()
        assert {plan.result().status_code for plan in plans} == {200}
