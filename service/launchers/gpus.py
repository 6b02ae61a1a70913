"""How many GPUs a job can have on this machine; asks the kernel's device files, no driver."""

import re
from collections.abc import Mapping
from pathlib import Path

_DEVICE = re.compile(r"nvidia[0-9]+")


def count_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """The NVIDIA GPUs that a process with this environment sees.

    Args:
        environment: its CUDA_VISIBLE_DEVICES, where it is set, narrows them (or, with MIG, names
            parts of them).
        devices: the folder of device files.
    """
    found = sum(1 for entry in devices.iterdir() if _DEVICE.fullmatch(entry.name))
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None or not found:
        return found
    visible = 0
    for name in named.split(","):
        if name.strip() in ("", "-1"):  # CUDA takes nothing that comes after
            break
        visible += 1
    return visible
