"""The batch script: quoting above all. Its course is run by bash here, beside a made-up srun."""

import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from service.launchers import LaunchRequest
from service.launchers.slurm.config import SlurmCluster
from service.launchers.slurm.script import (
    batch_script,
    file_pattern,
    sbatch_options,
    sbatch_value,
)
from service.spec import JobContext, JobSpec
from tests.service.store.sample_jobs import context, document
from tests.waiting import wait_until

JOB = "job-0123456789abcdef"
NASTY = [
    "x; touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    "a'b\"c",
    "a # b",
    "Big run",
    "-hetjob",
]
NASTY += ["../x", "я" * 300, "a && touch pwned", "${HOME}", "%j", "\\", "*", "!x", "a\tb"]


def request_of(folder: Path, attempt: int = 1, **parts: Any) -> LaunchRequest:
    resources = {"cluster": "slurm", **parts.pop("resources", {})}
    resolved = context(document(resources=resources, **parts), JOB)
    return LaunchRequest(job_id=JOB, attempt=attempt, job_dir=folder / JOB, context=resolved)


def named(request: LaunchRequest, name: str) -> LaunchRequest:
    """The request of a job whose name no pattern has held back."""
    spec = JobSpec.model_construct(**{**dict(request.context.spec), "name": name})
    resolved = JobContext.model_construct(**{**dict(request.context), "spec": spec})
    return LaunchRequest(
        job_id=request.job_id, attempt=1, job_dir=request.job_dir, context=resolved
    )


def options_of(script: str) -> list[str]:
    """The words of the `#SBATCH` lines, split as sbatch splits them."""
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    return [word for line in lines for word in shlex.split(line, comments=False)[1:]]


@pytest.mark.parametrize("name", [name for name in NASTY if name.isprintable()])
def test_g07_a_name_is_only_text(tmp_path: Path, name: str) -> None:
    script = batch_script(SlurmCluster(), named(request_of(tmp_path), name))
    options = options_of(script)
    assert [o for o in options if o.startswith("--job-name")] == [f"--job-name=planish-{JOB}-1"]
    assert f"--comment={name}" in options
    assert f"--output={tmp_path}/{JOB}/attempts/1/log" in options
    _, _, below = script.partition("set -u")
    assert name not in below or len(name) < 3
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.parametrize("name", ["a\n#SBATCH --uid=0", "a\0b", "a\rb", "a\tb", "a\u2028b"])
def test_g07_what_could_begin_another_line_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no place in an option"):
        batch_script(SlurmCluster(), named(request_of(tmp_path), name))


def test_g07_a_folder_is_only_text(tmp_path: Path) -> None:
    folder = tmp_path / "it's 100% $(touch pwned); #1"
    script = batch_script(SlurmCluster(), request_of(folder))
    (output,) = [o for o in options_of(script) if o.startswith("--output=")]
    assert output == f"--output={str(folder).replace('%', '%%')}/{JOB}/attempts/1/log"
    with pytest.raises(ValueError, match="backslash"):
        file_pattern("/data/a\\b")


def test_options_follow_the_job_and_the_cluster(tmp_path: Path) -> None:
    cluster = SlurmCluster(
        partition="gpu",
        account="ours",
        qos="normal",
        options=["--mail-type=FAIL", '--comment2=a "b" #c'],
        memory_gib_per_node=64,
    )
    plain = sbatch_options(cluster, request_of(tmp_path))
    assert {"--partition=gpu", "--account=ours", "--qos=normal", "--requeue"} <= set(plain)
    assert {"--nodes=1", "--cpus-per-task=2", "--mem=65536M", "--mail-type=FAIL"} <= set(plain)
    assert '"--comment2=a \\"b\\" #c"' in plain
    assert not any(o.startswith(("--time", "--gres", "--dependency")) for o in plain)
    asked = {
        "nodes": 2,
        "gpus_per_node": 8,
        "time_limit_minutes": 60,
        "memory_gib_per_node": 0.5,
        "slurm": {
            "partition": "a100,h100",
            "account": "theirs",
            "qos": "high",
            "reservation": "r1",
            "constraint": "a100&ib",
            "gres": "gpu:a100:8",
            "exclusive": True,
            "requeue": False,
            "after": [11, 12],
        },
    }
    full = sbatch_options(cluster, request_of(tmp_path, resources=asked))
    assert {
        "--partition=a100,h100",
        "--account=theirs",
        "--qos=high",
        "--reservation=r1",
        "--constraint=a100&ib",
        "--gres=gpu:a100:8",
        "--exclusive",
        "--no-requeue",
        "--dependency=afterok:11:12",
        "--kill-on-invalid-dep=yes",
        "--nodes=2",
        "--mem=512M",
    } <= set(full)
    # SLURM's limit comes after the service's, and its signal after the service's wish.
    (time,) = [o for o in full if o.startswith("--time=")]
    (before,) = [o for o in full if o.startswith("--signal=B:USR1@")]
    assert int(time.removeprefix("--time=")) * 60 - int(before.rpartition("@")[2]) > 60 * 60


def test_one_machine_runs_the_driver_and_several_meet_first(tmp_path: Path) -> None:
    one = batch_script(SlurmCluster(), request_of(tmp_path))
    assert f"python3 -m megatron_backend {tmp_path}/{JOB} --attempt" in one
    two = batch_script(SlurmCluster(), request_of(tmp_path, resources={"nodes": 2}))
    assert "srun --ntasks-per-node=1 --nodes=2 --ntasks=2 --cpu-bind=none python3 -m mega" in two


def test_a_driver_serves_metrics_where_the_cluster_says_so(tmp_path: Path) -> None:
    request = request_of(tmp_path)
    assert "METRICS" not in batch_script(SlurmCluster(), request)
    script = batch_script(SlurmCluster(metrics_port=9464), request)
    assert "export PLANISH_METRICS_PORT=9464\n" in script


def test_containers(tmp_path: Path) -> None:
    image = "nvcr.io#nvidia/pytorch:25.01-py3; touch pwned"
    pyxis = {"type": "pyxis", "image": image, "mounts": ["/shared:/shared"]}
    script = batch_script(SlurmCluster.model_validate({"container": pyxis}), request_of(tmp_path))
    assert f"'--container-image={image}'" in script
    assert f"--container-mounts=/shared:/shared,{tmp_path}:{tmp_path}" in script
    apptainer = {"type": "apptainer", "image": "/images/planish one.sif"}
    script = batch_script(
        SlurmCluster.model_validate({"container": apptainer}),
        request_of(tmp_path, resources={"gpus_per_node": 2}),
    )
    assert f"apptainer exec --bind {tmp_path}:{tmp_path} --nv '/images/planish one.sif'" in script
    assert "--gres=gpu:2" in script


@pytest.mark.parametrize("value", NASTY)
def test_a_value_of_sbatch_is_quoted_or_refused(value: str) -> None:
    if not value.isprintable():
        with pytest.raises(ValueError, match="no place"):
            sbatch_value(value)
        return
    (read,) = shlex.split(f"--x={sbatch_value(value)}", comments=True)
    assert read == f"--x={value}"


SRUN = """#!/bin/bash
printf '%s\\n' "$@" >"$PROOF/arguments"
env >"$PROOF/environment"
trap 'echo got USR1; exit 7' USR1
trap 'echo got TERM' TERM
echo srun >>"$PROOF/starts"
for _ in $(seq ${SRUN_TICKS:-0}); do sleep 0.05; done
exit ${SRUN_CODE:-0}
"""


class Bash:
    """Runs batch scripts as SLURM would, on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proof = folder / "proof"
        self.proof.mkdir()
        programs = folder / "bin"
        programs.mkdir()
        (programs / "srun").write_text(SRUN)
        (programs / "srun").chmod(0o755)
        self.environment = {"PATH": f"{programs}:/usr/bin:/bin", "PROOF": str(self.proof)}

    def start(self, script: str, slurm_id: int = 5, **more: str) -> subprocess.Popen[bytes]:
        variables = {**self.environment, "SLURM_JOB_ID": str(slurm_id), **more}
        path = self.folder / "script"
        path.write_text(script)
        return subprocess.Popen(["bash", str(path)], env=variables, cwd=self.proof)

    def run(self, script: str, slurm_id: int = 5, **more: str) -> int:
        return self.start(script, slurm_id, **more).wait(timeout=30)

    def starts(self) -> int:
        path = self.proof / "starts"
        return len(path.read_text().split()) if path.exists() else 0

    def log(self, attempt: int) -> str:
        return (self.folder / JOB / f"attempts/{attempt}/log").read_text()


@pytest.fixture
def bash(tmp_path: Path) -> Bash:
    return Bash(tmp_path)


def test_g07_no_text_is_run(bash: Bash) -> None:
    env = {f"V{i}": value for i, value in enumerate([*NASTY, "a\nb", "two  blanks"])}
    cluster = SlurmCluster(env=env, python="/opt/my python/$(touch pwned)")
    assert bash.run(batch_script(cluster, request_of(bash.folder))) == 0
    assert not list(bash.folder.rglob("pwned"))
    environment = (bash.proof / "environment").read_text()
    assert all(f"{name}={value}\n" in environment for name, value in env.items())
    arguments = (bash.proof / "arguments").read_text().splitlines()
    job_dir = str(bash.folder / JOB)
    assert arguments[-7:] == [
        *(cluster.python, "-m", "megatron_backend", job_dir, "--attempt", "1", "--log"),
    ]


def test_setup_is_shell_and_comes_before(bash: Bash) -> None:
    setup = 'module() { export LOADED="$1 of $PLANISH_ATTEMPT"; }\nmodule cuda\n'
    assert bash.run(batch_script(SlurmCluster(setup=setup), request_of(bash.folder, 3))) == 0
    environment = (bash.proof / "environment").read_text()
    assert "LOADED=cuda of 3\n" in environment
    assert f"PLANISH_JOB_ID={JOB}\n" in environment


def test_setup_may_look_at_variables_that_are_not_set(bash: Bash) -> None:
    cluster = SlurmCluster(setup='export LOADED="cuda$LD_LIBRARY_PATH_OF_NOBODY"')
    script = batch_script(cluster, request_of(bash.folder))
    assert bash.run(script) == 0
    assert "LOADED=cuda\n" in (bash.proof / "environment").read_text()
    assert script.rindex("\nset -u\n") > script.index("LOADED")


def test_a_job_that_is_queued_again_is_the_next_attempt(bash: Bash) -> None:
    script = batch_script(SlurmCluster(), request_of(bash.folder, 2))
    assert bash.run(script, SRUN_CODE="3") == 3
    assert bash.run(script, SLURM_RESTART_COUNT="1") == 0
    attempts = bash.folder / JOB / "attempts"
    assert (attempts / "2/slurm_job").read_text() == "5 2\n"
    assert (attempts / "3/slurm_job").read_text() == "5 2\n"
    assert (attempts / "2/slurm_exit").read_text() == "3\n"
    assert bash.starts() == 2


def test_of_two_jobs_for_one_attempt_one_runs(bash: Bash) -> None:
    script = batch_script(SlurmCluster(), request_of(bash.folder))
    assert bash.run(script, 5) == 0
    assert bash.run(script, 6) == 0
    assert bash.starts() == 1
    assert "leaves attempt 1 to SLURM job 5" in bash.log(1)


def test_what_was_cancelled_before_it_began_does_not_begin(bash: Bash) -> None:
    script = batch_script(SlurmCluster(), request_of(bash.folder))
    folder = bash.folder / JOB / "attempts/1"
    folder.mkdir(parents=True)
    (folder / "slurm_cancelled").touch()
    assert bash.run(script) == 0
    assert bash.run(script, SLURM_RESTART_COUNT="1") == 0
    assert bash.starts() == 0


def test_an_attempt_that_was_cancelled_is_run_by_no_job(bash: Bash) -> None:
    folder = bash.folder / JOB / "attempts/2"
    folder.mkdir(parents=True)
    (folder / "slurm_cancelled").touch()
    script = batch_script(SlurmCluster(), request_of(bash.folder))
    assert bash.run(script, SLURM_RESTART_COUNT="1") == 0
    assert bash.starts() == 0
    assert "was cancelled before attempt 2 began" in bash.log(2)
    assert bash.run(script) == 0  # the attempt before is not
    assert bash.starts() == 1


@pytest.mark.parametrize(
    ("number", "ticks", "code"),
    [(signal.SIGUSR1, "400", 7), (signal.SIGTERM, "20", 4)],
    ids=["USR1", "TERM"],
)
def test_usr1_is_handed_on_and_term_is_waited_out(
    bash: Bash, number: signal.Signals, ticks: str, code: int
) -> None:
    script = batch_script(SlurmCluster(), request_of(bash.folder))
    running = bash.start(script, SRUN_TICKS=ticks, SRUN_CODE="4")
    wait_until(bash.starts, "the driver starts", 20)
    os.kill(running.pid, number)
    assert running.wait(timeout=30) == code
    assert "got TERM" not in bash.log(1)
    assert (bash.folder / JOB / "attempts/1/slurm_exit").read_text() == f"{code}\n"
