"""The pods of a namespace as Prometheus' own discovery finds them.

Debian builds Prometheus without its discovery of Kubernetes. The same targets with the same labels
come by a file here, so the relabelling of deploy/prometheus/kubernetes.yml is what is tested.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SECONDS = 0.5


@contextmanager
def discovered(pods: Callable[[], Sequence[Mapping[str, Any]]], path: Path) -> Iterator[Path]:
    """Keeps the targets of `pods()`, read again and again, in a JSON file of `file_sd_configs`."""
    _write(path, pods())
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_SECONDS):
            _write(path, pods())

    thread = threading.Thread(target=follow, name="pods of Prometheus")
    thread.start()
    try:
        yield path
    finally:
        ended.set()
        thread.join()


def _write(path: Path, pods: Sequence[Mapping[str, Any]]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps([target for pod in pods for target in _targets(pod)]))
    fresh.replace(path)


def _targets(pod: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One for each port that a container declares, and one for a container without any."""
    address = pod["status"].get("podIP")
    if not address:
        return
    metadata = pod["metadata"]
    labels = {
        "namespace": metadata["namespace"],
        "pod_name": metadata["name"],
        "pod_ip": address,
        "pod_phase": pod["status"]["phase"],
        **_named("pod_label", metadata.get("labels") or {}),
        **_named("pod_annotation", metadata.get("annotations") or {}),
    }
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or [{}]:
            number = port.get("containerPort")
            more = {
                "pod_container_port_name": port.get("name"),
                "pod_container_port_number": number,
            }
            found = {f"__meta_kubernetes_{k}": str(v) for k, v in {**labels, **more}.items() if v}
            yield {
                "targets": [address if number is None else f"{address}:{number}"],
                "labels": found,
            }


def _named(prefix: str, values: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}_{re.sub('[^a-zA-Z0-9]', '_', name)}": v for name, v in values.items()}
