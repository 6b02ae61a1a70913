from pathlib import Path

import pytest

from service.launchers.gpus import compute_capability, count_gpus


@pytest.mark.parametrize(
    ("named", "count"),
    [
        (None, 2),
        ("0,1", 2),
        ("1", 1),
        ("", 0),
        ("-1", 0),
        ("1,-1,0", 1),
        ("MIG-a,MIG-b,MIG-c", 3),
    ],
)
def test_gpus_are_counted_as_cuda_will_see_them(
    tmp_path: Path, named: str | None, count: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    environment = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    assert count_gpus(environment, tmp_path) == count


def test_a_machine_without_any(tmp_path: Path) -> None:
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == 0


@pytest.mark.parametrize(
    ("script", "capability"),
    [
        ("echo 9.0; echo 8.9", (8, 9)),
        ("echo 10.0; echo 9.0", (9, 0)),
        ("echo '[N/A]'", None),
        ("exit 9", None),
    ],
)
def test_the_oldest_card_decides(
    tmp_path: Path, script: str, capability: tuple[int, int] | None
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert compute_capability(str(program)) == capability


def test_without_a_driver_nobody_knows(tmp_path: Path) -> None:
    assert compute_capability(str(tmp_path / "nvidia-smi")) is None
