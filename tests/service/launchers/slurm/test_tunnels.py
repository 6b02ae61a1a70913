"""Commands through each tunnel. NeMo-Run's need an environment with it, PLANISH_NEMO_RUN_PYTHON;
the one over SSH also an sshd on this machine."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.launchers import LauncherUnavailable
from service.launchers.slurm.config import NemoRunTunnelConfig, SshTunnelConfig
from service.launchers.slurm.nemo_run import PROGRAM, NemoRunTunnel
from service.launchers.slurm.tunnel import LocalTunnel, Tunnel
from tests.ports import free_port
from tests.service.launchers.slurm.test_script import NASTY
from tests.waiting import wait_until

INTERPRETER = os.environ.get("PLANISH_NEMO_RUN_PYTHON", "")
VARIABLES = {"SLURM_CONF": "/etc/slurm/a b.conf"}
# NeMo-Run has an environment of its own, which `make test-cluster` makes.
needs_nemo_run = pytest.mark.skipif(
    not INTERPRETER,
    reason="PLANISH_NEMO_RUN_PYTHON names no interpreter; scripts/nemo_run_env.sh makes one",
)


@pytest.fixture(scope="module")
def login_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshTunnelConfig]:
    """A real sshd on the loopback interface, which takes one key."""
    sshd, keygen = shutil.which("sshd") or "/usr/sbin/sshd", shutil.which("ssh-keygen")
    if not Path(sshd).exists() or keygen is None:
        pytest.skip("no sshd here (Debian's openssh-server)")
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host", "user"):
        subprocess.run([keygen, "-q", "-N", "", "-t", "ed25519", "-f", folder / name], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    port = free_port()
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it
    options = {
        "ListenAddress": "127.0.0.1",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "authorized",
        "PidFile": "none",
        "Subsystem": "sftp internal-sftp",
        "StrictModes": "no",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
    }
    given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    command = [sshd, "-D", "-e", "-f", "/dev/null", "-p", str(port), *given]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: _listens(port), "sshd listens", 20)
        yield SshTunnelConfig(
            type="ssh",
            host="127.0.0.1",
            user="root",
            port=port,
            identity=str(folder / "user"),
            nemo_run_python=INTERPRETER,
        )
    finally:
        server.terminate()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(
    scope="module",
    params=[
        "local",
        pytest.param("nemo-run", marks=[pytest.mark.cluster, needs_nemo_run]),
        pytest.param(
            "ssh",
            marks=[
                pytest.mark.cluster,
                needs_nemo_run,
                pytest.mark.skipif(os.geteuid() != 0, reason="sshd is root's"),
            ],
        ),
    ],
)
def tunnel(request: pytest.FixtureRequest) -> Iterator[Tunnel]:
    """Each tunnel."""
    opened: Tunnel
    if request.param == "local":
        opened = LocalTunnel(seconds=20, variables=VARIABLES)
    elif request.param == "nemo-run":
        config = NemoRunTunnelConfig(type="nemo_run", nemo_run_python=INTERPRETER)
        opened = NemoRunTunnel(config, seconds=20, variables=VARIABLES)
    else:
        config = request.getfixturevalue("login_node")
        opened = NemoRunTunnel(config, seconds=20, variables=VARIABLES)
    yield opened
    opened.close()


def test_g07_words_arrive_as_words(tunnel: Tunnel, tmp_path: Path) -> None:
    arguments = [word for word in [*NASTY, "two  blanks", "a\nb"] if "\0" not in word]
    ran = tunnel.run(["/usr/bin/printf", "%s|", *arguments])
    assert ran.code == 0, ran.errors
    assert ran.output == "".join(f"{word}|" for word in arguments)
    assert not list(tmp_path.rglob("pwned"))


def test_what_a_command_says_comes_back_apart(tunnel: Tunnel) -> None:
    ran = tunnel.run(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (ran.code, ran.output, ran.errors) == (3, "out\n", "err\n")


def test_a_script_arrives_whole_on_its_input(tunnel: Tunnel) -> None:
    script = "#!/bin/bash\n" + "".join(f"# line {i} $(touch pwned) é\n" for i in range(500))
    assert tunnel.run(["/bin/cat"], text=script).output == script


def test_commands_see_their_variables_and_none_of_the_services(
    tunnel: Tunnel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret123")
    told = tunnel.run(["/usr/bin/env"]).output
    assert f"SLURM_CONF={VARIABLES['SLURM_CONF']}\n" in told
    assert "hf_secret123" not in told


def test_a_command_that_takes_too_long_is_no_answer() -> None:
    tunnel = LocalTunnel(seconds=0.2, variables={})
    with pytest.raises(LauncherUnavailable, match=r"within 0\.2 s"):
        tunnel.run(["/bin/sleep", "30"])
    with pytest.raises(LauncherUnavailable, match="cannot be run"):
        tunnel.run(["/no/such/program"])


def test_an_interpreter_that_is_not_there_is_no_answer(tmp_path: Path) -> None:
    for python, complaint in ((str(tmp_path / "none"), "does not start"), ("/bin/true", "ended")):
        config = NemoRunTunnelConfig(type="nemo_run", nemo_run_python=python)
        tunnel = NemoRunTunnel(config, seconds=5, variables={})
        with pytest.raises(LauncherUnavailable, match=complaint):
            tunnel.run(["/bin/true"])
        tunnel.close()


INTERPRETER_LIKE = """#!/bin/sh
printf '%s' "$3" >"$0.wanted"
echo '{"connected": true}'
read -r request
echo '{"id": 1, "code": 0, "output": "", "errors": ""}'
exec sleep 60
"""


def test_nemo_runs_folder_goes_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    python = tmp_path / "python"
    python.write_text(INTERPRETER_LIKE)
    python.chmod(0o755)
    config = NemoRunTunnelConfig(type="nemo_run", nemo_run_python=str(python))
    tunnel = NemoRunTunnel(config, seconds=20, variables={})
    assert tunnel.run(["/bin/true"]).code == 0
    home = Path(json.loads((tmp_path / "python.wanted").read_text())["home"])
    assert home.is_dir()
    tunnel.close()
    assert not list(tmp_path.glob("nemo-run-*"))


def test_nemo_runs_folder_goes_with_a_program_that_ends_by_itself(tmp_path: Path) -> None:
    """As where the service was killed; here it does not come so far as to connect."""
    home = tmp_path / "home"
    home.mkdir()
    wanted = json.dumps({"home": str(home), "type": "local"})
    ran = subprocess.run(
        [sys.executable, "-I", PROGRAM, wanted], input=b"", capture_output=True, check=False
    )
    assert b"fault" in ran.stdout
    assert not home.exists()


@pytest.mark.cluster
@needs_nemo_run
def test_a_silent_command_ends_the_tunnel_and_the_next_opens_another() -> None:
    config = NemoRunTunnelConfig(type="nemo_run", nemo_run_python=INTERPRETER)
    tunnel = NemoRunTunnel(config, seconds=3, variables={})
    try:
        assert tunnel.run(["/bin/echo", "one"]).output == "one\n"
        with pytest.raises(LauncherUnavailable, match="within 3 s"):
            tunnel.run(["/bin/sleep", "30"])
        assert tunnel.run(["/bin/echo", "two"]).output == "two\n"
    finally:
        tunnel.close()


@pytest.mark.cluster
@needs_nemo_run
@pytest.mark.skipif(os.geteuid() != 0, reason="sshd is root's")
def test_a_login_node_that_refuses_the_key_is_told_so(
    login_node: SshTunnelConfig, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", other], check=True)
    config = login_node.model_copy(update={"identity": str(other)})
    tunnel = NemoRunTunnel(config, seconds=20, variables={})
    with pytest.raises(LauncherUnavailable, match="no connection"):
        tunnel.run(["/bin/true"])
    tunnel.close()
