"""The command that Ray runs for an attempt, and how it is kept from running.

Ray cannot be trusted to start a job only while somebody wants it. A submission whose answer was
lost may arrive minutes later; a job that waits for a machine stays PENDING after it was stopped,
and starts when there is one; a Ray whose head was replaced has forgotten which ids it had. So who
may run is settled in the attempt's folder, which driver and service both see: `taken` is a symbolic
link, which only one can make. The command makes it, to `driver`, before anything else; `cancel`
makes it, to `nobody`, before it asks Ray for anything. Whoever comes second does nothing.

Ray asks a driver to end by TERM, and kills it after a time that it is told at the start
(RAY_JOB_STOP_WAIT_TIME_S), too late for a grace that turned out shorter. For that the command
leaves a watch behind, which is no child of the driver, whose children get Ray's TERM too. When the
file `kill` is there, or the driver has ended, it kills whatever came out of the driver, found by a
mark in its environment. Ranks are Ray's own processes, and end with the driver's connection.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from service.launchers.processes import ATTEMPT_VARIABLE, JOB_VARIABLE
from service.launchers.protocol import LaunchRequest
from service.settings import DATA_ROOTS_VARIABLE, joined_roots
from service.spec.attempt import attempt_path

TAKEN, KILL = "taken", "kill"
DRIVER, NOBODY = "driver", "nobody"
EXIT_TAKEN = 75
EXIT_NO_FOLDER = 78
SPARE_STOP_SECONDS = 120
"""How much longer than the job's own grace Ray lets a driver end: the service is to be first."""

_MARK = "PLANISH_DRIVER"
# SPT_NOENV: setproctitle, which Ray calls, otherwise writes titles over the mark.
_SCRIPT = """\
mkdir {attempts} {folder} 2>/dev/null
test -d {folder} || exit {no_folder}
ln -s {driver} {taken} || exit {already}
watch() {{
  while kill -0 $$ && test ! -e {kill}; do sleep 1; done
  for e in $(grep -lzxF {mark} /proc/[0-9]*/environ); do
    e=${{e%/environ}}
    kill -9 "${{e#/proc/}}"
  done
  kill -9 -$$
}}
( watch >/dev/null 2>&1 & )
exec env {mark} SPT_NOENV=1 {command}"""


def submission(
    request: LaunchRequest,
    submission_id: str,
    *,
    python: str,
    env: Mapping[str, str],
    data_roots: Sequence[Path],
    driver_resources: Mapping[str, float],
) -> dict[str, Any]:
    """The body of the request that submits an attempt; it holds no secret.

    Args:
        request: the attempt.
        submission_id: Ray's id for it.
        python: the worker's interpreter.
        env: the operator's variables.
        data_roots: folders that environments may read files from.
        driver_resources: what the driver takes of Ray's own resources.
    """
    grace = math.ceil(request.context.spec.faults.grace_seconds)
    variables = {
        **env,
        JOB_VARIABLE: request.job_id,
        ATTEMPT_VARIABLE: str(request.attempt),
        DATA_ROOTS_VARIABLE: joined_roots(data_roots),
        "RAY_JOB_STOP_WAIT_TIME_S": str(grace + SPARE_STOP_SECONDS),
    }
    body: dict[str, Any] = {
        "submission_id": submission_id,
        "entrypoint": entrypoint(request, submission_id, python=python),
        "runtime_env": {"env_vars": variables},
        "metadata": {"planish_job": request.job_id, "planish_attempt": str(request.attempt)},
    }
    if driver_resources:
        body["entrypoint_resources"] = dict(driver_resources)
    return body


def entrypoint(request: LaunchRequest, submission_id: str, *, python: str) -> str:
    """The command, for the shell that Ray gives it to."""
    folder = attempt_path(request.job_dir, request.attempt)
    command = [python, "-m", "megatron_backend", str(request.job_dir)]
    return _SCRIPT.format(
        attempts=shlex.quote(str(folder.parent)),
        folder=shlex.quote(str(folder)),
        driver=DRIVER,
        mark=shlex.quote(f"{_MARK}={submission_id}"),
        taken=shlex.quote(str(folder / TAKEN)),
        kill=shlex.quote(str(folder / KILL)),
        no_folder=EXIT_NO_FOLDER,
        already=EXIT_TAKEN,
        command=shlex.join([*command, "--attempt", str(request.attempt), "--log"]),
    )
