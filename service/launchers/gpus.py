"""What GPUs a job can have on this machine.

How many there are is asked of the kernel's device files, which needs no driver. What they can do
only their driver knows.
"""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

_DEVICE = re.compile(r"nvidia[0-9]+")
_CAPABILITY = re.compile(r"([0-9]+)\.([0-9]+)")


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


def compute_capability(program: str = "nvidia-smi") -> tuple[int, int] | None:
    """CUDA compute capability of the oldest GPU here, as (9, 0); None where nobody knows.

    Args:
        program: NVIDIA's tool, by name or path.
    """
    command = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = [_CAPABILITY.fullmatch(line.strip()) for line in answer.stdout.splitlines()]
    return min(((int(one[1]), int(one[2])) for one in found if one), default=None)
