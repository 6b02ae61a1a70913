"""The command; see the package."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_backend.ray_nodes.follow import follow
from megatron_backend.ray_nodes.lead import lead
from megatron_backend.ray_nodes.process import StepFailed, machine, say
from service.spec.attempt import attempt_path


def main(arguments: Sequence[str]) -> int:
    """Runs this task; the exit code of the driver on task 0."""
    parser = argparse.ArgumentParser(prog="python -m megatron_backend.ray_nodes")
    parser.add_argument("job_dir", type=Path, metavar="JOB_DIR", help="the job's folder")
    parser.add_argument("--attempt", type=int, required=True, metavar="N", help="its number")
    parser.add_argument("--log", action="store_true", help="of the driver")
    parsed = parser.parse_args(arguments)
    folder = attempt_path(parsed.job_dir.resolve(), parsed.attempt)
    task, tasks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        driver = [sys.executable, "-m", "megatron_backend", *arguments]
        return lead(folder, tasks, driver) if task == 0 else follow(folder)
    except (StepFailed, OSError) as error:
        say(f"task {task} on {machine()}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
