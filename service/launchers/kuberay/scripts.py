"""The shell text of a RayJob: the command that Ray starts, and what pods do before they end.

Ray gives a job's command to a shell, so all that comes from elsewhere is quoted. Around the driver
the command does what nobody else can do in time:

- An attempt that was shut out between its RayJob's making and now does not start.
- The first start leaves its pod's uid in `head`; see `record`.
- A driver that the kernel killed for want of memory cannot say so; the container's counter can.

A pod that is deleted (a cancel, a drained node, an eviction by Kueue) first runs its preStop hook;
Ray gets TERM only after it, and ends all that runs in it at once. So the head's hook passes TERM to
the driver, which finishes its step and saves while all its ranks live, and waits for its end. The
hooks of the workers wait for the same, but only where the head is being ended too.

A driver takes a second TERM for impatience, so it must get no more than one, whoever asks. Ray's
Jobs API would send it to every process of the job; with RAY_JOB_STOP_SIGNAL it sends INT instead,
which the driver does not see, and the shell passes it on.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path

from service.launchers.kuberay.record import ENDING, HEAD, OUT_OF_MEMORY, SHUT_OUT
from service.spec.attempt import attempt_path

POD_UID_VARIABLE = "PLANISH_POD_UID"

EXIT_SHUT_OUT = 3
SCRATCH = "/tmp"
"""A folder of the pod's own; the command tells the hook there what it started."""

_TELL = "mkdir {scratch}/planish-told 2>/dev/null && kill -TERM $(cat {scratch}/planish-driver)"
"""TERM to the driver, once: a folder can be made only once."""

_COMMAND = f"""\
mkdir -p {{folder}} && cd {{folder}} || exit 64
[ ! -e {SHUT_OUT} ] || exit {EXIT_SHUT_OUT}
(set -C; echo "${POD_UID_VARIABLE}" > {HEAD}) 2>/dev/null
asked=
trap 'asked=yes' INT TERM  # one that comes before it is written down whom to tell
{{driver}} & driver=$!
echo $driver > {{scratch}}/planish-driver
trap '{_TELL}' INT TERM
if [ -n "$asked" ]; then {_TELL}; fi
wait $driver; code=$?
while kill -0 $driver 2>/dev/null; do wait $driver; code=$?; done
if [ $code = 137 ]; then
  cat {{counters}} 2>/dev/null | grep -q '^oom_kill [1-9]' && : > {OUT_OF_MEMORY}
fi
exit $code
"""
_COUNTERS = "/sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control"
"""Of the container, under cgroup v2 and v1."""

_HEAD_HOOK = f"""\
cd {{folder}} || exit 0
[ -s {{scratch}}/planish-driver ] || exit 0
: > {ENDING}
{_TELL}
while kill -0 $(cat {{scratch}}/planish-driver) 2>/dev/null; do sleep 0.2; done
"""

_WORKER_HOOK = f"""\
cd {{folder}} || exit 0
tries=0
while [ ! -e {ENDING} ]; do
  tries=$((tries + 1)); [ $tries -lt 15 ] || exit 0
  sleep 0.2
done
while [ ! -e outcome.json ]; do sleep 0.2; done
"""


def entrypoint(
    python: str,
    job_dir: Path,
    attempt: int,
    *,
    scratch: str = SCRATCH,
    counters: str = _COUNTERS,
) -> str:
    """The RayJob's command."""
    driver = [python, "-m", "megatron_backend", str(job_dir), "--attempt", str(attempt), "--log"]
    return _COMMAND.format(
        folder=_folder(job_dir, attempt),
        driver=shlex.join(driver),
        scratch=scratch,
        counters=counters,
    )


def hooks(job_dir: Path, attempt: int, *, scratch: str = SCRATCH) -> Mapping[str, str]:
    """What `head` and `worker` run before they end."""
    folder = _folder(job_dir, attempt)
    return {
        "head": _HEAD_HOOK.format(folder=folder, scratch=scratch),
        "worker": _WORKER_HOOK.format(folder=folder),
    }


def _folder(job_dir: Path, attempt: int) -> str:
    return shlex.quote(str(attempt_path(job_dir, attempt)))
