"""The script for a GPU runs its whole path without one."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


@pytest.mark.long
def test_the_dry_run_measures_every_part(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, "--out", out, "--dry-run"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    report = json.loads(out.read_text())
    assert report["machine"]["dry_run"]
    trained = [name for name in report if name.startswith("train ")]
    recipes = ("bf16", "delayed", "tensorwise", "blockwise", "mxfp8")
    assert trained == [f"train {name}" for name in recipes]
    for name in trained:
        assert "error" not in report[name], report[name]
        assert all(math.isfinite(loss) for loss in report[name]["losses"])
        assert report[name]["losses"][-1] < report[name]["losses"][0]
    assert set(report["ratios"]) == set(recipes)
    assert "error" not in report["decode"], report["decode"]
    assert report["decode"]["largest_log_prob_difference"] < 0.1


def test_without_a_gpu_it_asks_for_a_dry_run(tmp_path: Path) -> None:
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, "--out", tmp_path / "check.json"],
        env=hidden,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert "--dry-run" in ran.stderr
