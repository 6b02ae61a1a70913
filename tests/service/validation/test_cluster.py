"""What no machine of a cluster has is refused before a job is stored."""

from pathlib import Path

import pytest

from service.launchers.local import LocalLauncher
from service.spec import JobSpec
from service.validation.cluster import check_cluster


def spec(**resources: int | str) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "sample",
            "model": {"path": "tiny"},
            "algorithm": {"type": "sft"},
            "data": {"train": "file-0123456789abcdef"},
            "resources": resources,
        }
    )


@pytest.mark.parametrize(
    ("gpus", "resources", "field", "fix"),
    [
        (0, {"gpus_per_node": 1}, "resources.gpus_per_node", "use 0, which runs the ranks on the"),
        (2, {"gpus_per_node": 4}, "resources.gpus_per_node", "use at most 2"),
        (2, {"gpus_per_node": 2, "nodes": 2}, "resources.nodes", "use at most 1"),
        (2, {"cluster": "moon"}, "resources.cluster", "use one of: local"),
    ],
)
def test_what_this_machine_has_not(
    tmp_path: Path, gpus: int, resources: dict[str, int | str], field: str, fix: str
) -> None:
    launchers = {"local": LocalLauncher(tmp_path, gpus=gpus)}
    (problem,) = check_cluster(spec(**resources), launchers)
    assert problem.field == field
    assert problem.fix is not None
    assert fix in problem.fix


@pytest.mark.parametrize("resources", [{}, {"gpus_per_node": 2}])
def test_what_it_has(tmp_path: Path, resources: dict[str, int | str]) -> None:
    assert check_cluster(spec(**resources), {"local": LocalLauncher(tmp_path, gpus=2)}) == []
