"""A real Prometheus over the configuration of deploy/prometheus, for tests."""

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

DEPLOY = Path(__file__).parents[3] / "deploy" / "prometheus"
READY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A server that scrapes and evaluates its rules every second."""

    http: httpx.Client

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now: `metric` and `value` of each."""
        return list(self._ask("query", query=expression)["result"])

    def value(self, expression: str) -> float | None:
        """The value of an expression that has one sample; null where it has none."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None

    def rules(self) -> list[dict[str, Any]]:
        """Every rule that is loaded, with its health and its alerts."""
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def firing(self) -> dict[str, dict[str, Any]]:
        """The alerts that fire, by name."""
        alerts = self._ask("alerts")["alerts"]
        return {a["labels"]["alertname"]: a for a in alerts if a["state"] == "firing"}

    def _ask(self, what: str, **parameters: str) -> dict[str, Any]:
        answer = self.http.get(f"/api/v1/{what}", params=parameters).json()
        assert answer["status"] == "success", answer
        return dict(answer["data"])


def wait_until[Found](look: Callable[[], Found], what: str, seconds: float) -> Found:
    """The first thing found that counts as true."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.3)


@contextmanager
def prometheus(folder: Path, *, target: str) -> Iterator[Prometheus]:
    """Starts one in `folder` that scrapes `target` (host:port) as the job `planish`."""
    shutil.copytree(DEPLOY / "rules", folder / "rules")
    config = yaml.safe_load((DEPLOY / "planish.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=30, trust_env=False) as http:
            wait_until(lambda: _ready(process, http, log), "Prometheus is ready", READY_SECONDS)
            yield Prometheus(http)
    finally:
        process.terminate()
        process.wait(timeout=30)


def _ready(process: subprocess.Popen[bytes], http: httpx.Client, log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        return http.get("/-/ready").is_success
    except httpx.TransportError:
        return False
