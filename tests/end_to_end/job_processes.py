"""The processes of a job on this machine, for tests that kill them."""

import psutil

MARKS = {"rank": "ray::RankActor", "driver": "-m megatron_backend", "raylet": "raylet/raylet "}


def processes(job: str, target: str) -> list[psutil.Process]:
    """The job's processes of that kind."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or []) + " "
        try:
            if MARKS[target] in line and process.environ().get("PLANISH_JOB_ID") == job:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
