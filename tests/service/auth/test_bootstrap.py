"""The first key: made for a new service only, and never against a revocation."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.auth.bootstrap import ensure_first_key
from service.auth.keys import hash_secret
from service.settings import Settings
from service.store import Store
from tests.service.running_service import KEY


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(Settings(data_dir=tmp_path).store_url)
    yield opened
    opened.close()


def start(store: Store, tmp_path: Path, key: str | None = None) -> str | None:
    settings = Settings.model_validate({"data_dir": tmp_path, "bootstrap_key": key})
    return ensure_first_key(store, settings)


def words(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What these functions logged; threads of other tests may be at work still."""
    return [each.getMessage() for each in caplog.records if each.name == "service.auth.bootstrap"]


def test_the_first_start_makes_a_key_and_later_ones_none(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = start(store, tmp_path)
    assert secret is not None
    assert store.keys.by_hash(hash_secret(secret)) is not None
    assert start(store, tmp_path) is None
    assert words(caplog) == []


def test_after_the_last_key_was_revoked_a_start_makes_none_and_says_so(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(store, tmp_path)
    (key,) = store.keys.listed()
    store.keys.revoke(key.id)
    assert start(store, tmp_path) is None
    assert store.keys.count() == 0
    (said,) = words(caplog)
    assert said == (
        "no API key is accepted, since all were revoked; `planish keys new NAME` makes one"
    )


def test_a_key_that_was_brought_does_not_come_back_after_its_revocation(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert start(store, tmp_path, KEY) is None
    (revoked,) = store.keys.listed()
    store.keys.revoke(revoked.id)
    before = store.keys.listed()
    assert start(store, tmp_path, KEY) is None
    assert store.keys.by_hash(hash_secret(KEY)) is None
    assert store.keys.listed() == before
    assert words(caplog) == [
        f"the key in PLANISH_BOOTSTRAP_KEY was revoked ({revoked.id}) and stays refused; set "
        "another one there",
        "no API key is accepted, since all were revoked; `planish keys new NAME` makes one",
    ]
    for secret in (KEY, hash_secret(KEY)):
        assert secret not in caplog.text

    caplog.clear()
    store.keys.add("laptop", "a" * 64)
    start(store, tmp_path, KEY)
    (said,) = words(caplog)
    assert "stays refused" in said


def test_another_key_that_is_brought_is_accepted_beside_the_others(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(store, tmp_path)
    for key in (KEY, KEY + "2", KEY):
        assert start(store, tmp_path, key) is None
    assert [key.name for key in store.keys.listed()] == ["first", "bootstrap", "bootstrap"]
    assert store.keys.count() == 3
    assert words(caplog) == []
