"""A release of the chart, and the API behind its Service."""

import base64
import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from service.client import Client
from tests.cluster.helm.conftest import Programs
from tests.waiting import wait_until

WAIT = ("--wait", "--timeout", "600s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One release in a namespace of its own."""

    programs: Programs
    namespace: str
    values: Path
    """The file that `write` wrote last."""
    name: str = "trial"

    def write(self, values: Mapping[str, Any]) -> None:
        """Sets the values for what comes next."""
        self.values.write_text(yaml.safe_dump(dict(values)))

    def helm(self, verb: str, *arguments: str, check: bool = True) -> str:
        """Runs a verb of helm on this release; returns what it said."""
        done = self.programs.helm(
            verb, self.name, *arguments, "--namespace", self.namespace, check=check
        )
        return done.stdout if check else done.stdout + done.stderr

    def install(self, chart: Path, *arguments: str) -> str:
        return self.helm("install", str(chart), "-f", str(self.values), *arguments)

    def upgrade(self, chart: Path, *arguments: str, check: bool = True) -> str:
        return self.helm("upgrade", str(chart), "-f", str(self.values), *arguments, check=check)

    def get(self, *arguments: str) -> Any:
        """What `kubectl get` finds in the namespace."""
        return self.programs.get("-n", self.namespace, *arguments)

    def pods(self) -> set[str]:
        """Names of the service's pods."""
        found = self.get("pods", "-l", "app.kubernetes.io/component=service")
        return {pod["metadata"]["name"] for pod in found["items"]}

    def key(self) -> str:
        """The first API key."""
        secret = self.get("secret", f"{self.name}-planish-bootstrap-key")
        return base64.b64decode(secret["data"]["api-key"]).decode()

    @contextmanager
    def api(self) -> Iterator[httpx.Client]:
        """Plain HTTP to the API, through the Service."""
        with self._forwarded() as url:
            headers = {"authorization": f"Bearer {self.key()}"}
            with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
                yield client

    @contextmanager
    def client(self) -> Iterator[Client]:
        """Our client of the API, through the Service."""
        with self._forwarded() as url, Client(url, self.key()) as client:
            yield client

    @contextmanager
    def _forwarded(self) -> Iterator[str]:
        """A port of this machine that leads to one of the Service's pods, as a URL."""
        with subprocess.Popen(
            [
                self.programs.kubectl_path, "-n", self.namespace, "port-forward",
                f"service/{self.name}-planish", ":8000",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as forward:  # fmt: skip
            try:
                assert forward.stdout is not None
                line = forward.stdout.readline()
                port = re.search(r"127\.0\.0\.1:(\d+)", line)
                assert port is not None, line + forward.stdout.read()
                yield f"http://127.0.0.1:{port.group(1)}"
            finally:
                forward.terminate()

    def left(self) -> set[str]:
        """All objects of the namespace, as KIND/NAME, without what each namespace has by itself."""
        kinds = self.programs.kubectl(
            "api-resources", "--verbs=list", "--namespaced", "-o", "name"
        ).stdout.split()
        kinds = [kind for kind in kinds if not kind.startswith("events")]
        found = self.get(",".join(kinds))["items"]
        names = {f"{each['kind']}/{each['metadata']['name']}" for each in found}
        return names - {"ConfigMap/kube-root-ca.crt", "ServiceAccount/default"}

    def wait_for(self, wanted: set[str], seconds: float = 60) -> None:
        """Waits until these objects, each KIND/NAME, are there."""

        def missing() -> set[str]:
            return wanted - self.left()

        wait_until(
            lambda: not missing(),
            "all objects are made",
            seconds,
            details=lambda: f"missing: {missing()}",
            pause=1,
        )

    def left_after(self, seconds: float, expected: set[str]) -> set[str]:
        """`left`, asked again until it is as expected or the time is over."""
        deadline = time.monotonic() + seconds
        while (found := self.left()) != expected and time.monotonic() < deadline:
            time.sleep(1)
        return found


def upload(api: httpx.Client, rows: list[dict[str, Any]]) -> str:
    """Uploads rows for training; returns the file's id."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    answer = api.post("/v1/files", files={"file": ("rows.jsonl", text)})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])
