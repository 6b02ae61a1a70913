"""The pages of SLURM and Kubernetes tell every field of their kind of cluster, and no other."""

import re
from pathlib import Path

import pytest

from service.launchers import ClusterConfig
from service.launchers.kuberay.config import KubeRayCluster
from service.launchers.slurm.config import SlurmCluster

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "heading", "config"),
    [
        ("slurm.md", "What an operator says", SlurmCluster),
        ("kubernetes.md", "What the operator of a cluster says", KubeRayCluster),
    ],
)
def test_the_table_has_each_field_once(
    page: str, heading: str, config: type[ClusterConfig]
) -> None:
    section = (DOCS / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1]
    table = section.split("\n## ")[0]
    first_cells = re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE)
    told = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(told) == sorted(config.model_fields.keys() - {"type"})
