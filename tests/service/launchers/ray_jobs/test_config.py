import re
from pathlib import Path
from typing import Any

import pytest

from service.installed import InvalidClusters, read_clusters
from service.launchers import Site
from service.launchers.ray_jobs.config import RayJobsCluster
from service.settings import Settings


def settings(tmp_path: Path, options: str) -> Settings:
    path = tmp_path / "clusters.yaml"
    path.write_text(f"clusters:\n  ray: {{type: ray_jobs, {options}}}\n")
    return Settings(data_dir=tmp_path, clusters_file=path)


def test_a_clusters_file_names_a_ray(tmp_path: Path) -> None:
    options = (
        "address: 'http://head:8265', max_jobs: 3, nodes: 4, gpus_per_node: 8, "
        "compute_capability: [9, 0], driver_resources: {driver: 1}, env: {HF_HOME: /models}"
    )
    config = read_clusters(settings(tmp_path, options))["ray"]
    launcher = config.open(Site(jobs_dir=tmp_path))
    assert (launcher.capacity, launcher.nodes, launcher.gpus_per_node) == (3, 4, 8)
    assert launcher.compute_capability == (9, 0)
    launcher.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("max_jobs: 3", "clusters.ray.address"),
        ("address: 'ray://head:10001'", "clusters.ray.address"),
        ("address: 'http://head:8265', python: '  '", "clusters.ray.python"),
        ("address: 'http://head', env: {'A B': x}", "clusters.ray.env"),
        ("address: 'http://head', env: {PLANISH_ATTEMPT: '2'}", "is set by the launcher"),
        ("address: 'http://head', token_variable: NOT_SET_HERE", "NOT_SET_HERE"),
        ("address: 'http://head', token_variable: HOME, token_file: /t", "not both"),
        ("address: 'http://head', ca_file: /nowhere/ca.pem", "/nowhere/ca.pem"),
        ("address: 'http://head', driver_resources: {slot: 0}", "driver_resources"),
    ],
)
def test_what_cannot_be_used_is_told(tmp_path: Path, options: str, words: str) -> None:
    with pytest.raises(InvalidClusters, match=re.escape(words)):
        read_clusters(settings(tmp_path, options))


def test_a_token_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TOKEN", "secret")
    options: dict[str, Any] = {"address": "http://head", "token_variable": "RAY_TOKEN"}
    config = RayJobsCluster(type="ray_jobs", **options)
    assert config._token() == "secret"
    assert "secret" not in repr(config)
