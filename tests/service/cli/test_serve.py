"""`planish serve` as a process: the first key, signals, kill -9."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from service.cli.main import app
from service.settings import MIB, Settings

PLANISH = str(Path(sys.executable).with_name("planish"))


class Served:
    """One `planish serve`."""

    def __init__(self, data_dir: Path, *options: str, key: str | None = None) -> None:
        environment = os.environ | {"XDG_CONFIG_HOME": str(data_dir.parent / "config")}
        environment.pop("PLANISH_BOOTSTRAP_KEY", None)
        if key is not None:
            environment["PLANISH_BOOTSTRAP_KEY"] = key
        self.process = subprocess.Popen(
            [PLANISH, "serve", "--data-dir", str(data_dir), "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self.output = ""

    def url(self) -> str:
        """Its address, once it listens."""
        assert self.process.stdout is not None
        while not (found := re.search(r"listens on (http\S+)", self.output)):
            line = self.process.stdout.readline()
            assert line, self.output
            self.output += line
        return found[1]

    def end(self, sig: signal.Signals) -> int:
        self.process.send_signal(sig)
        rest, _ = self.process.communicate(timeout=300)
        self.output += rest
        return self.process.returncode


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


def get(url: str, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.get(f"{url}/v1/jobs", headers=headers, timeout=120).status_code


def settings_of(data_dir: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Settings:
    """What `planish serve OPTIONS` would run the service with."""
    made: list[Settings] = []

    def run_server(host: str, port: int, others: Mapping[str, Any], **_: bool) -> None:
        made.append(Settings.model_validate({**others, "host": host, "port": port}))

    monkeypatch.setattr("service.cli.server.run_server", run_server)
    done = CliRunner().invoke(
        app, ["serve", "--data-dir", str(data_dir), *options], env={"PLANISH_DATABASE_URL": None}
    )
    assert done.exit_code == 0, done.output
    return made[0]


def test_what_no_option_says_is_as_the_settings_have_it(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings_of(data_dir, monkeypatch) == Settings(data_dir=data_dir)


def test_limits_can_be_set(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--max-upload-mib", "3", "--catalogue-timeout-seconds", "0.5")
    settings = settings_of(data_dir, monkeypatch, *options)
    assert (settings.max_upload_bytes, settings.catalogue_timeout_seconds) == (3 * MIB, 0.5)


def test_the_first_start_prints_a_key_once_and_a_signal_ends_it_well(data_dir: Path) -> None:
    first = Served(data_dir)
    url = first.url()
    while "shown this once" not in first.output:
        first.output += first.process.stdout.readline()  # type: ignore[union-attr]
    (key,) = re.findall(r"planish_\S+", first.output)
    assert get(url, key) == 200
    assert stat.S_IMODE(data_dir.stat().st_mode) == 0o700
    saved = data_dir.parent / "config" / "planish" / "connection.json"
    while not saved.exists():
        time.sleep(0.01)
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert first.end(signal.SIGTERM) == 0
    assert first.output.count(key) == 1

    second = Served(data_dir)
    url = second.url()
    assert get(url, key) == 200
    assert second.end(signal.SIGKILL) == -signal.SIGKILL
    assert "planish_" not in second.output

    third = Served(data_dir)  # after kill -9, all is there
    url = third.url()
    assert get(url, key) == 200
    assert third.end(signal.SIGINT) == 0
    found = json.loads(saved.read_text())
    assert (found["url"], found["api_key"]) == (url, key)


def test_a_bootstrap_key_is_taken_and_not_printed(data_dir: Path) -> None:
    key = "planish_" + "b" * 30
    served = Served(data_dir, "--no-save-connection", key=key)
    assert get(served.url(), key) == 200
    environment = Path(f"/proc/{served.process.pid}/environ")
    assert environment.exists()
    assert served.end(signal.SIGTERM) == 0
    assert key not in served.output
    assert not (data_dir.parent / "config").exists()


@pytest.mark.parametrize(
    ("options", "key", "says"),
    [
        (("--max-local-jobs", "0"), "planish_short", ["at least 20", "greater than or equal to 1"]),
        (("--data-dir", "/dev/null/data"), None, ["cannot be used"]),
        (("--host", "203.0.113.7"), None, ["cannot listen"]),
    ],
)
def test_wrong_settings_end_with_a_reason_and_make_nothing(
    data_dir: Path, options: tuple[str, ...], key: str | None, says: list[str]
) -> None:
    served = Served(data_dir, *options, key=key)
    output, _ = served.process.communicate(timeout=300)
    assert served.process.returncode == 2
    assert all(text in output for text in says), output
    assert "Traceback" not in output
    assert not data_dir.exists()


def test_a_database_that_cannot_be_used_ends_the_service(data_dir: Path) -> None:
    served = Served(data_dir, "--database-url", "sqlite:////proc/planish.db")
    output, _ = served.process.communicate(timeout=300)
    assert served.process.returncode == 2
    assert "the database cannot be used" in output
    assert "Traceback" not in output
