"""Where the CLI finds the service, and that a key only goes where it was made for."""

import stat
from pathlib import Path

import pytest

from service.cli.connection import (
    NotConfigured,
    SavedConnection,
    read_saved,
    resolve,
    save,
    saved_path,
)


@pytest.fixture(autouse=True)
def _config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


HERE = SavedConnection(url="http://127.0.0.1:8000", api_key="planish_saved", data_dir="/data")


def test_the_saved_file_is_for_its_owner_only() -> None:
    path = save(HERE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_saved() == HERE
    save(HERE)
    assert [entry.name for entry in path.parent.iterdir()] == ["connection.json"]


def test_without_options_the_saved_connection_is_used() -> None:
    save(HERE)
    found = resolve(None, None)
    assert (found.url, found.api_key) == (HERE.url, HERE.api_key)
    assert resolve(None, "planish_other").api_key == "planish_other"


def test_the_saved_key_goes_to_no_other_address() -> None:
    save(HERE)
    assert resolve("http://127.0.0.1:8000/", None).api_key == HERE.api_key
    with pytest.raises(NotConfigured, match="PLANISH_API_KEY"):
        resolve("http://elsewhere:8000", None)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(NotConfigured, match="PLANISH_URL"):
        resolve(None, None)
    with pytest.raises(NotConfigured, match="http://"):
        resolve("localhost:8000", "planish_x")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"url": 1, "x": 2}', "\xff"])
def test_a_broken_file_is_as_none(text: str) -> None:
    saved_path().parent.mkdir(parents=True)
    saved_path().write_text(text, encoding="latin-1")
    assert read_saved() is None
