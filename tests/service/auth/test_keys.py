"""API keys: long, random, kept as a hash only."""

import json
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from service.app import create_app
from service.auth.keys import KEY_PATTERN, hash_secret, new_key, same_hash
from service.jobs import JobState
from service.settings import Settings
from tests.service.running_service import KEY, RunningService


def test_keys_differ_and_have_256_bits() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(KEY_PATTERN.fullmatch(key) and len(key) == len("planish_") + 43 for key in keys)


def test_a_hash_tells_the_right_key_from_another() -> None:
    key = new_key()
    assert same_hash(key, hash_secret(key))
    assert not same_hash(new_key(), hash_secret(key))
    assert key not in hash_secret(key)


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/files", "/v1/algorithms", "/v1/environments"])
@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Basic cGxhbmlzaA==",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY.upper()}",
        f"bearer planish_{'é' * 32}".encode(),
        KEY,
    ],
)
def test_without_a_known_key_there_is_a_401(
    service: RunningService, path: str, header: str | bytes | None
) -> None:
    headers = {} if header is None else {"authorization": header}
    answer = service.anonymous.get(f"{path}", headers=headers)  # type: ignore[arg-type]
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.json()["type"] == "urn:planish:problem:unauthorized"
    assert KEY not in answer.text


def test_every_v1_route_asks_for_a_key(service: RunningService) -> None:
    document = service.anonymous.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method in methods:
            concrete = path.replace("{attempt}", "1").replace("{job}", "x").replace("{file}", "x")
            answer = service.anonymous.request(method, f"{concrete}")
            is_open = path in {"/healthz", "/readyz", "/metrics"}
            assert (answer.status_code != 401) == is_open, (method, path)


def test_a_revoked_key_is_refused(service: RunningService) -> None:
    secret = new_key()
    key = service.store.keys.add("guest", hash_secret(secret))
    headers = {"authorization": f"Bearer {secret}"}
    assert service.anonymous.get("/v1/jobs", headers=headers).status_code == 200
    service.store.keys.revoke(key.id)
    assert service.anonymous.get("/v1/jobs", headers=headers).status_code == 401


def test_each_replica_refuses_a_revoked_key_at_its_next_request(
    new_service: Callable[..., RunningService],
) -> None:
    """None of them keeps keys in memory: the bound is no time, but the next request."""
    replicas = [new_service(), new_service()]
    secret = new_key()
    key = replicas[0].store.keys.add("guest", hash_secret(secret))
    headers = {"authorization": f"Bearer {secret}"}

    def statuses() -> list[int]:
        return [one.anonymous.get("/v1/jobs", headers=headers).status_code for one in replicas]

    assert statuses() == [200, 200]
    replicas[0].store.keys.revoke(key.id)
    assert statuses() == [401, 401]


def test_only_the_hash_is_on_disk(new_service: Callable[..., RunningService]) -> None:
    service = new_service()
    service.submit()
    service.stop()
    for path in service.settings.data_dir.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path
    connection = sqlite3.connect(service.settings.data_dir / "planish.db")
    hashes = connection.execute("select secret_hash from api_keys").fetchall()
    connection.close()
    assert hashes == [(hash_secret(KEY),)]


@pytest.mark.asyncio
async def test_the_first_key_is_told_once_and_works(tmp_path: Path) -> None:
    told: list[str] = []
    for _ in range(2):
        app = create_app(Settings(data_dir=tmp_path), launchers={}, on_first_key=told.append)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                headers = {"authorization": f"Bearer {told[0]}"}
                assert (await http.get("/v1/jobs", headers=headers)).status_code == 200
    assert len(told) == 1


@pytest.mark.parametrize("key", ["planish_short", "sk-" + "a" * 40, "planish_" + "ä" * 30, ""])
def test_a_bootstrap_key_that_can_be_guessed_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValidationError, match="at least 20") as caught:
        Settings.model_validate({"data_dir": tmp_path, "bootstrap_key": key})
    assert not key or key not in str(caught.value)


def test_settings_do_not_show_the_key(tmp_path: Path) -> None:
    settings = Settings.model_validate({"data_dir": tmp_path, "bootstrap_key": KEY})
    assert KEY not in repr(settings)
    assert KEY not in settings.model_dump_json()


def test_g25_no_secret_in_answers_or_logs(
    new_service: Callable[..., RunningService], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    service = new_service(behaviours=("fail=USER_ERROR",), capacity=1)
    job = service.submit()["id"]
    service.wait_for(job, JobState.FAILED)
    token = (service.settings.jobs_dir / job / "attempts" / "1" / "token").read_text()
    answers = [
        service.http.get(path).text
        for path in (
            f"/v1/jobs/{job}",
            f"/v1/jobs/{job}/events",
            f"/v1/jobs/{job}/logs",
            "/v1/jobs",
            "/metrics",
        )
    ]
    shown = json.dumps(answers) + caplog.text
    for secret in (KEY, token, hash_secret(token), hash_secret(KEY)):
        assert secret not in shown
