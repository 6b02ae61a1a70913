"""A real Prometheus over the configuration of deploy/prometheus, for tests."""

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from service.api.resources import JobResource
from service.client import Client
from tests.ports import free_port
from tests.waiting import wait_until

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

    def wait_for_value(self, expression: str, value: float) -> None:
        """Until an expression has a value. One look is not enough: a scrape that took longer than
        the second it has leaves series out until the next."""
        wait_until(
            lambda: self.value(expression) == value,
            f"{expression} is {value:g}",
            60,
            details=lambda: f"it is {self.value(expression)}",
        )

    def wait_until_gone(self, labels: str) -> None:
        """Until no series has these labels, after a scrape of the service that went well."""
        self.wait_for_value(f'absent({{{labels}}}) and on() (up{{job="planish"}} == 1)', 1)

    def rules(self) -> list[dict[str, Any]]:
        """Every rule that is loaded, with its health and its alerts."""
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def targets(self) -> list[tuple[str, str, str]]:
        """What is scraped: its address, health and last error."""
        found = self._ask("targets")["activeTargets"]
        return [(each["scrapeUrl"], each["health"], each["lastError"]) for each in found]

    def firing(self) -> dict[str, dict[str, Any]]:
        """The alerts that fire, by name."""
        alerts = self._ask("alerts")["alerts"]
        return {a["labels"]["alertname"]: a for a in alerts if a["state"] == "firing"}

    def _ask(self, what: str, **parameters: str) -> dict[str, Any]:
        answer = self.http.get(f"/api/v1/{what}", params=parameters).json()
        assert answer["status"] == "success", answer
        return dict(answer["data"])


def assert_scraped(server: Prometheus, client: Client, job: JobResource) -> None:
    """What the service and the driver told of a job while it ran is what the job said itself."""
    losses = {row.values["loss"] for row in client.metrics(job.id)}
    for told_by in ("planish", "planish-drivers"):
        series = f'planish_job_loss{{job="{told_by}", job_id="{job.id}"}}'
        found = server.query(f"last_over_time({series}[1h])")
        assert found, (f"{told_by} was not scraped", server.targets())
        assert {float(sample["value"][1]) for sample in found} <= losses, (told_by, found)


def beside(service: str, *drivers: str) -> dict[str, Any]:
    """The configuration of one machine: addresses (host:port) of the service and of drivers."""
    config = _config("planish.yml")
    config["scrape_configs"][0]["static_configs"] = [{"targets": [service]}]
    if drivers:
        found = [{"targets": list(drivers)}]
        config["scrape_configs"].append({"job_name": "planish-drivers", "static_configs": found})
    return config


def in_kubernetes(pods: Path) -> dict[str, Any]:
    """The configuration of Kubernetes, whose pods stand in a file (see pods.py)."""
    config = _config("kubernetes.yml")
    for scraped in config["scrape_configs"]:
        assert scraped.pop("kubernetes_sd_configs") == [{"role": "pod"}]
        scraped["file_sd_configs"] = [{"files": [str(pods)], "refresh_interval": "1s"}]
    return config


def _config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    return config


@contextmanager
def prometheus(
    folder: Path, config: Mapping[str, Any], *, within: Sequence[str] = (), host: str = "127.0.0.1"
) -> Iterator[Prometheus]:
    """Starts one in `folder`.

    Args:
        folder: for its configuration, data and log; it is there.
        config: see `beside` and `in_kubernetes`.
        within: a command that runs another in a network of its own.
        host: its address, as this process reaches it.
    """
    shutil.copytree(DEPLOY / "rules", folder / "rules")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(dict(config)))
    port, log = free_port(), folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *within,
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={host}:{port}",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
    try:
        url = f"http://{host}:{port}"
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
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
