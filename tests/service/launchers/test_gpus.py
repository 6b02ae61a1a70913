from pathlib import Path

import pytest

from service.launchers.gpus import count_gpus


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
