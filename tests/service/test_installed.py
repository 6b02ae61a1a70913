"""The clusters file: what it opens, and that a fault in it is told by place."""

from pathlib import Path

import pytest

from service.installed import InvalidClusters, open_launchers, read_clusters
from service.launchers.local import LocalLauncher
from service.settings import Settings


def settings(tmp_path: Path, text: str | None) -> Settings:
    if text is None:
        return Settings(data_dir=tmp_path, max_local_jobs=3)
    file = tmp_path / "clusters.yaml"
    file.write_text(text)
    return Settings(data_dir=tmp_path, clusters_file=file)


def test_without_a_file_this_machine_is_the_only_cluster(tmp_path: Path) -> None:
    launchers = open_launchers(settings(tmp_path, None))
    assert list(launchers) == ["local"]
    assert launchers["local"].capacity == 3


def test_each_cluster_of_the_file_is_opened_under_its_name(tmp_path: Path) -> None:
    text = "clusters: {here: {type: local, max_jobs: 2}, there: {type: local, max_jobs: null}}"
    launchers = open_launchers(settings(tmp_path, text))
    assert {name: one.capacity for name, one in launchers.items()} == {"here": 2, "there": None}
    assert isinstance(launchers["here"], LocalLauncher)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("clusters: [", "cannot be read"),
        ("", "one mapping `clusters`"),
        ("clusters: {}", "one mapping `clusters`"),
        ("clusters: {a: {type: local}}\nmore: 1", "one mapping `clusters`"),
        ("clusters: {A!: {type: local}}", "cannot be named 'A!'"),
        ("clusters: {a: {}}", "clusters.a.type must be one of: "),
        ("clusters: {a: {type: moon}}", "it is 'moon'"),
        ("clusters: {a: local}", "clusters.a.type must be one of: "),
        ("clusters: {a: {type: local, max_jobs: 0}}", "clusters.a.max_jobs: "),
        ("clusters: {a: {type: local, jobs: 1}}", "clusters.a.jobs: unknown field 'jobs'"),
    ],
)
def test_a_fault_is_told_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InvalidClusters) as raised:
        read_clusters(settings(tmp_path, text))
    assert told in str(raised.value)
    assert "clusters.yaml" in str(raised.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    missing = Settings(data_dir=tmp_path, clusters_file=tmp_path / "none.yaml")
    with pytest.raises(InvalidClusters, match=r"none\.yaml cannot be read"):
        read_clusters(missing)
