"""The batch script of an attempt: a pure function of the operator's config and the request.

Three kinds of text go into it, and none of them is ever read as something else:

- `#SBATCH` lines. sbatch splits them at blanks, ends them at `#` and knows quotes; a line break
  would begin a line of the script. `sbatch_value` quotes, and refuses what has no place in a line.
- Words of the shell. `shlex.quote` makes each one word, whatever is in it.
- The operator's own lines (`setup`), which are meant to be shell, and stand where they are.

From a job come only its id, numbers, words that `service.spec.resources` restricts to SLURM's own
signs, and its name, which is the job's comment in SLURM.

SLURM may run the script again under the same id, when the job was preempted or lost a machine. Each
run is an attempt of its own (see `service.spec.attempt`), and takes it by a file that only one run
can make, `attempts/N/slurm_job`. So a job that was submitted twice, because the answer to the first
submission was lost, runs once, and what was cancelled before it began does not begin.

USR1 comes to the script alone: from SLURM some time before the time limit (`--signal=B:`), or from
`scancel --batch` where the service wants an end. It is handed on to srun, which hands it on to the
driver. TERM comes from SLURM to every process of the job, before it kills them (a preemption, a
plain scancel). It is not handed on: srun takes TERM for the wish to end the step. Of either signal
bash would die, and srun with it; so both are caught, and the script waits on.
"""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template

from service.launchers.machines import ranks_per_node
from service.launchers.processes import ATTEMPT_VARIABLE, JOB_VARIABLE
from service.launchers.protocol import LaunchRequest
from service.launchers.slurm.config import ApptainerContainer, PyxisContainer, SlurmCluster
from service.settings import DATA_ROOTS_VARIABLE, joined_roots
from service.spec import JobContext, driver_variables
from service.spec.attempt import attempt_path
from service.spec.resources import SlurmSpec

_LIMIT_CHECK_SECONDS = 60
"""SLURM looks at time limits every 30 s or so, and may be late."""

_TEMPLATE = Template(
    r"""#!/bin/bash
$options
set -u
umask 0022
job_dir=$job_dir
first=$first
attempt=$$((first + $${SLURM_RESTART_COUNT:-0}))
folder=$$job_dir/attempts/$$attempt
mkdir -p "$$folder" || exit
exec >>"$$folder/log" 2>&1

# Was it cancelled before it began? Does another job of SLURM run this attempt?
if [ -e "$$job_dir/attempts/$$first/slurm_cancelled" ] || [ -e "$$folder/slurm_cancelled" ]; then
  echo "planish: SLURM job $$SLURM_JOB_ID was cancelled before attempt $$attempt began"
  exit 0
fi
offer=$$folder/.slurm_job-$$SLURM_JOB_ID
printf '%s %s\n' "$$SLURM_JOB_ID" "$$first" >"$$offer" || exit
ln "$$offer" "$$folder/slurm_job" 2>/dev/null
rm -f "$$offer"
read -r owner _ <"$$folder/slurm_job" || exit
if [ "$$owner" != "$$SLURM_JOB_ID" ]; then
  echo "planish: SLURM job $$SLURM_JOB_ID leaves attempt $$attempt to SLURM job $$owner"
  exit 0
fi

$variables
export $attempt_variable=$$attempt
set +u  # what an operator's lines load (modules, conda) looks at variables that are not set
$setup
set -u
caught=
trap 'caught=TERM' TERM
trap 'caught=USR1' USR1
$step &
step=$$!
while :; do
  wait "$$step"
  code=$$?
  [ -n "$$caught" ] || break
  [ "$$caught" != USR1 ] || kill -s USR1 "$$step" 2>/dev/null
  caught=
done
printf '%s\n' "$$code" >"$$folder/.slurm_exit" && mv "$$folder/.slurm_exit" "$$folder/slurm_exit"
exit "$$code"
"""
)


def batch_script(
    cluster: SlurmCluster, request: LaunchRequest, data_roots: Sequence[Path] = ()
) -> str:
    """The script that `sbatch` is given.

    Args:
        cluster: the operator's config.
        request: the attempt.
        data_roots: folders that environments may read files from.

    Raises:
        ValueError: the path of the job's folder has no place in a line of options.
    """
    options = "\n".join(f"#SBATCH {option}" for option in sbatch_options(cluster, request))
    variables = {
        **cluster.env,
        JOB_VARIABLE: request.job_id,
        DATA_ROOTS_VARIABLE: joined_roots(data_roots),
        driver_variables.GRACE_SECONDS: f"{cluster.grace_seconds:g}",
        driver_variables.SIGNAL_SECONDS: str(signal_seconds(cluster, request.context)),
        "PYTHONUNBUFFERED": "1",
        # setproctitle, which Ray calls, otherwise writes titles over the memory behind
        # /proc/PID/environ.
        "SPT_NOENV": "1",
    }
    if cluster.metrics_port is not None:
        variables[driver_variables.METRICS_PORT] = str(cluster.metrics_port)
    return _TEMPLATE.substitute(
        options=options,
        job_dir=shlex.quote(str(request.job_dir)),
        first=str(request.attempt),
        variables="\n".join(
            f"export {name}={shlex.quote(value)}" for name, value in variables.items()
        ),
        attempt_variable=ATTEMPT_VARIABLE,
        setup=cluster.setup.rstrip(),
        step=_step(cluster, request),
    )


def job_name(job_id: str, attempt: int) -> str:
    """Name of the job of SLURM that an attempt is submitted as."""
    return f"planish-{job_id}-{attempt}"


def sbatch_options(cluster: SlurmCluster, request: LaunchRequest) -> list[str]:
    """Options of sbatch, each quoted as a `#SBATCH` line wants it.

    Raises:
        ValueError: a value has no place in a line of options.
    """
    asked = request.context.spec.resources
    own = asked.slurm or SlurmSpec()
    options: dict[str, str | None] = {
        "job-name": job_name(request.job_id, request.attempt),
        "comment": request.context.spec.name,
        # What SLURM itself says of the job goes where the first attempt's words are.
        "output": file_pattern(str(attempt_path(request.job_dir, request.attempt) / "log")),
        "open-mode": "append",
        "chdir": str(request.job_dir),
        "export": "ALL",
        "partition": own.partition or cluster.partition,
        "account": own.account or cluster.account,
        "qos": own.qos or cluster.qos,
        "reservation": own.reservation or cluster.reservation,
        "constraint": own.constraint or cluster.constraint,
        "nodes": str(asked.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(asked.cpus_per_node or ranks_per_node(request.context) + 1),
        "signal": f"B:USR1@{signal_seconds(cluster, request.context)}",
    }
    if asked.gpus_per_node or own.gres:
        gres = own.gres or cluster.gres
        options["gres"] = gres or f"gpu:{asked.gpus_per_node}"
    memory = asked.memory_gib_per_node or cluster.memory_gib_per_node
    if memory is not None:
        options["mem"] = f"{max(1, round(memory * 1024))}M"
    if asked.time_limit_minutes is not None:
        options["time"] = str(asked.time_limit_minutes + _slack_minutes(cluster, request.context))
    if own.after:
        options["dependency"] = "afterok:" + ":".join(map(str, own.after))
        options["kill-on-invalid-dep"] = "yes"
    found = [f"--{name}={sbatch_value(value)}" for name, value in options.items() if value]
    found.append("--requeue" if own.requeue else "--no-requeue")
    if own.exclusive:
        found.append("--exclusive")
    return found + [sbatch_value(option) for option in cluster.options]


_PLAIN = frozenset(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_./:,=@+%&|*()[]"
)


def sbatch_value(value: str) -> str:
    """A value as a `#SBATCH` line wants it: quoted where it holds a blank, a quote or a `#`.

    Raises:
        ValueError: it holds a line break or another control character.
    """
    if not value.isprintable():
        raise ValueError(f"{value!r} holds a character that has no place in an option of sbatch")
    if value and _PLAIN.issuperset(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def file_pattern(path: str) -> str:
    """A path as sbatch's `--output` takes it: `%` begins a replacement there, `%%` is a `%`.

    Raises:
        ValueError: it holds a backslash, which switches the replacements off.
    """
    if "\\" in path:
        raise ValueError(f"{path!r} holds a backslash, which SLURM reads in its own way")
    return path.replace("%", "%%")


def signal_seconds(cluster: SlurmCluster, context: JobContext) -> int:
    """How long before SLURM's time limit the driver is told."""
    if cluster.signal_seconds is not None:
        return cluster.signal_seconds
    return min(65535, math.ceil(context.spec.faults.grace_seconds) + _LIMIT_CHECK_SECONDS)


def _slack_minutes(cluster: SlurmCluster, context: JobContext) -> int:
    """What SLURM's limit is above the job's own, so that the service's word comes first: it counts
    from the driver's first sign of life, and lets the driver save."""
    seconds = signal_seconds(cluster, context) + context.spec.faults.grace_seconds
    return math.ceil((seconds + 2 * _LIMIT_CHECK_SECONDS + cluster.poll_seconds) / 60)


def _step(cluster: SlurmCluster, request: LaunchRequest) -> str:
    """The srun line. One machine needs no Ray before the driver, which starts its own."""
    nodes = request.context.spec.resources.nodes
    # Unbound, else a task may be kept on one core: srun does not take over the job's
    # `--cpus-per-task` (SLURM 22.05 on). Without it a step has all of the job's CPUs.
    tasks = ["--ntasks-per-node=1", f"--nodes={nodes}", f"--ntasks={nodes}"]
    step = ["srun", *tasks, "--cpu-bind=none"]
    command = [cluster.python, "-m", "megatron_backend"]
    if nodes > 1:
        command[-1] += ".ray_nodes"
    container = cluster.container
    if isinstance(container, PyxisContainer):
        step += [
            f"--container-image={container.image}",
            f"--container-mounts={_mounts(container, request)}",
        ]
    elif isinstance(container, ApptainerContainer):
        apptainer = ["apptainer", "exec", "--bind", _mounts(container, request)]
        if container.nvidia and request.context.spec.resources.gpus_per_node:
            apptainer.append("--nv")
        command = [*apptainer, container.image, *command]
    quoted = shlex.join([*step, *command, str(request.job_dir)])
    return f'{quoted} --attempt "$attempt" --log'


def _mounts(container: PyxisContainer | ApptainerContainer, request: LaunchRequest) -> str:
    jobs = request.job_dir.parent
    return ",".join([*container.mounts, f"{jobs}:{jobs}"])
