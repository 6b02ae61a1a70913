"""Ray over the tasks of a step, which are processes of this machine here."""

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_backend.ray_nodes import follow as follow_module
from megatron_backend.ray_nodes import lead as lead_module
from megatron_backend.ray_nodes import meeting as meeting_module
from megatron_backend.ray_nodes import process as process_module
from megatron_backend.ray_nodes.follow import follow
from megatron_backend.ray_nodes.lead import SAME_SIGNAL_SECONDS, Gathering, Signals
from megatron_backend.ray_nodes.meeting import Meeting, Peer, own_address
from megatron_backend.ray_nodes.process import RayProcess, StepFailed
from tests.waiting import wait_until

SECONDS = 20.0

LEAD = """
import sys
from pathlib import Path
from megatron_backend.ray_nodes.lead import lead
sys.exit(lead(Path(sys.argv[1]), 2, [sys.executable, *sys.argv[2:]]))
"""
FOLLOW = """
import sys
from pathlib import Path
from megatron_backend.ray_nodes.follow import follow
sys.exit(follow(Path(sys.argv[1])))
"""
DRIVER = """
import os, signal, sys, time
from pathlib import Path
import ray

received = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda n, _: received.append(n))
ray.init(address=os.environ["RAY_ADDRESS"], configure_logging=False)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda n, _: received.append(n))

@ray.remote(num_cpus=2, scheduling_strategy="SPREAD")
class Rank:
    def look(self):
        print("words of a rank")
        status = Path("/proc/self/status").read_text()
        mask = int(status.split("SigBlk:")[1].split()[0], 16)
        blocked = [n for n in (signal.SIGTERM, signal.SIGUSR1) if mask >> (n - 1) & 1]
        return os.getpid(), ray.get_runtime_context().get_node_id(), len(blocked)

ranks = [Rank.remote() for _ in range(2)]
found = ray.get([rank.look.remote() for rank in ranks], timeout=300)
assert len({node for _, node, _ in found}) == 2, found
assert all(blocked == 2 for _, _, blocked in found), found
Path(sys.argv[1], "ready").write_text(" ".join(str(pid) for pid, _, _ in found))
deadline = time.monotonic() + 120
while not received and time.monotonic() < deadline:
    time.sleep(0.05)
time.sleep(1)
assert received == [signal.SIGUSR1], received
ray.get([rank.look.remote() for rank in ranks], timeout=60)  # they live still
sys.exit(7)
"""


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a task."""
    for name, value in (("SLURM_JOB_ID", "5"), ("SLURM_STEP_ID", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)


def meeting_of(run: str, machine: str | None = None, host: str = "127.0.0.1") -> Meeting:
    here = socket.gethostname()
    return Meeting(run=run, machine=machine or here, host=host, port=1, token="secret")


@pytest.mark.usefixtures("step")
def test_a_meeting_is_a_secret_and_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ray.json"
    meeting_of("5.0.0").write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Meeting.await_at(path) == meeting_of("5.0.0")
    assert [p.name for p in tmp_path.iterdir()] == ["ray.json"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # what the first run left is not this one's
    monkeypatch.setattr(meeting_module, "START_SECONDS", 0.3)
    with pytest.raises(StepFailed, match="did not write"):
        Meeting.await_at(path)


@pytest.mark.usefixtures("step")
def test_a_loopback_of_another_machine_leads_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "ray.json"
    meeting_of("5.0.0", machine="n1", host="127.0.1.1").write(path)
    with pytest.raises(StepFailed, match=r"n1, which knows no address of its own but 127\.0\.1\.1"):
        Meeting.await_at(path)
    meeting_of("5.0.0", machine="n1", host="10.0.0.1").write(path)
    assert Meeting.await_at(path).host == "10.0.0.1"


class NoWayOut(socket.socket):
    """A socket on a machine without a route, whose one address is 10.0.0.1."""

    def connect(self, _: object) -> None:
        raise OSError("Network is unreachable")

    def bind(self, address: tuple[str, int]) -> None:  # type: ignore[override]
        if address[0] not in ("10.0.0.1", "127.0.1.1"):
            raise OSError("Cannot assign requested address")


@pytest.mark.parametrize(
    ("launched_from", "expected"),
    [("10.0.0.1", "10.0.0.1"), ("10.0.0.9", "127.0.0.1"), (None, "127.0.0.1")],
    ids=["own", "of-another", "unknown"],
)
def test_without_a_route_slurm_knows_the_address(
    monkeypatch: pytest.MonkeyPatch, launched_from: str | None, expected: str
) -> None:
    addresses = {socket.gethostname(): "127.0.1.1", "n1": "127.0.1.1", "10.0.0.1": "10.0.0.1"}

    def resolve(name: str) -> str:
        return addresses.get(name, "10.0.0.9" if name else "0.0.0.0")

    monkeypatch.setattr(meeting_module.socket, "socket", NoWayOut)
    monkeypatch.setattr(meeting_module.socket, "gethostbyname", resolve)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.delenv("SLURM_LAUNCH_NODE_IPADDR", raising=False)
    if launched_from is not None:
        monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", launched_from)
    assert own_address() == expected
    addresses["n1"] = "10.0.0.1"
    assert own_address() == "10.0.0.1"


@pytest.fixture
def pair() -> Iterator[tuple[Peer, Peer]]:
    one, other = socket.socketpair()
    with one, other:
        yield Peer(one), Peer(other)


def test_peers_talk_in_whole_messages(pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    assert other.hear(0.0) == {}
    one.say(up=True)
    one.say(lost="n2: gone")
    assert other.hear(1.0) == {"up": True}
    assert other.hear(1.0) == {"lost": "n2: gone"}
    one.connection.sendall(b'{"half": ')
    assert other.hear(0.1) == {}
    one.connection.sendall(b"1}\n")
    assert other.hear(1.0) == {"half": 1}
    one.connection.close()
    assert other.hear(1.0) is None
    other.say(up=True)  # nobody is there; that is no error


class StartedHead:
    """Of `RayProcess`, what a gathering asks of the head."""

    address = "10.0.0.1:5"

    def started(self) -> bool:
        return True


@pytest.fixture
def signals() -> Iterator[Signals]:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)}
    yield Signals()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_only_who_knows_the_secret_is_gathered(signals: Signals) -> None:
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()

        def come() -> None:
            stranger, friend = (Peer(socket.create_connection(address)) for _ in range(2))
            stranger.say(token="wrong")
            stranger.say(up=True)
            friend.say(token="secret")
            told = None
            while not told:
                told = friend.hear(1.0)
            friend.say(up=told["address"] == "10.0.0.1:5")
            stack.callback(stranger.connection.close)
            stack.callback(friend.connection.close)

        visitor = threading.Thread(target=come)
        visitor.start()
        head: RayProcess = StartedHead()  # type: ignore[assignment]
        gathered = Gathering(listener, 1, "secret", stack).wait(head, signals)
        visitor.join()
        assert len(gathered) == 1


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\xff\n",
        b"[" * 60_000 + b"\n",
        '{"token": "ключ"}\n'.encode(),
        b'{"token": "\\ud800"}\n',
    ],
    ids=["http", "tls", "deep", "non-ascii", "surrogate"],
)
def test_a_stranger_is_sent_away_and_the_others_are_waited_for(
    signals: Signals, greeting: bytes
) -> None:
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:
        stranger, friend = (
            stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(2)
        )
        stranger.sendall(greeting)
        Peer(friend).say(token="secret")
        Peer(friend).say(up=True)
        head: RayProcess = StartedHead()  # type: ignore[assignment]
        gathered = Gathering(listener, 1, "secret", stack).wait(head, signals)
        assert len(gathered) == 1
        stranger.settimeout(10.0)
        assert stranger.recv(1) == b""


def test_a_machine_that_goes_before_all_are_there_ends_the_step(signals: Signals) -> None:
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:
        visitor = Peer(socket.create_connection(listener.getsockname()))
        visitor.say(token="secret")
        visitor.say(lost="Ray has ended on n2 (code 1)")
        head: RayProcess = StartedHead()  # type: ignore[assignment]
        with pytest.raises(StepFailed, match="Ray has ended on n2"):
            Gathering(listener, 2, "secret", stack).wait(head, signals)
        visitor.connection.close()


def test_a_signal_that_is_repeated_at_once_is_one(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(lead_module.time, "monotonic", lambda: now)
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
        os.kill(os.getpid(), number)
    assert signals.take() == [signal.SIGUSR1, signal.SIGTERM]
    now += SAME_SIGNAL_SECONDS
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signals.take() == [signal.SIGUSR1]
    assert signals.take() == []


def test_a_head_is_tried_on_another_port_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "START_TRIES", 3)
    monkeypatch.setattr(process_module.sys, "executable", "/bin/echo")  # says its words, and ends
    log = tmp_path / "log"
    head = RayProcess([], head=True, address="10.0.0.1", log=log, token="x")
    head._process.wait()
    first = log.read_text().split()
    assert f"--port={head.address.removeprefix('10.0.0.1:')}" in first
    head.started()
    head._process.wait()
    second = log.read_text().split()
    assert f"--port={head.address.removeprefix('10.0.0.1:')}" in second
    assert first[-1] != second[-1]


@pytest.mark.parametrize(
    ("cpus", "gpus", "named"), [("1", "8", "8"), ("12", "8", "12"), ("3", "", "3")]
)
def test_a_machine_has_a_cpu_for_each_of_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: str, gpus: str, named: str
) -> None:
    monkeypatch.setattr(process_module.sys, "executable", "/bin/echo")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", cpus)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", gpus)
    process = RayProcess([], address="10.0.0.1", log=tmp_path / "log", token="x")
    process._process.wait()
    arguments = (tmp_path / "log").read_text().split()
    assert f"--num-cpus={named}" in arguments
    assert f"--num-gpus={gpus or 0}" in arguments


class RayOfAFollower:
    """Of `RayProcess`, its folder of a session."""

    def __init__(self, arguments: Sequence[str], **_more: object) -> None:
        named = [a.removeprefix("--temp-dir=") for a in arguments if a.startswith("--temp-dir=")]
        # Without a folder of its own it takes the head's.
        self.session = Path(*(named or [os.environ["RAY_TMPDIR"], "head"]), "session_1")
        (self.session / "logs").mkdir(parents=True)

    def started(self) -> bool:
        return True

    def check(self) -> None:
        """It lives."""

    def kill(self) -> None:
        assert self.session.exists()


@pytest.mark.usefixtures("step", "signals")
def test_a_follower_leaves_nothing_of_its_ray_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_module, "RayProcess", RayOfAFollower)
    scratch = tmp_path / "scratch"  # which is not there yet
    monkeypatch.setenv("RAY_TMPDIR", str(scratch))
    during: list[str] = []

    def play_leader(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            peer = Peer(connection)
            assert peer.hear(SECONDS) == {"token": "secret"}
            peer.say(address="10.0.0.1:5")
            assert peer.hear(SECONDS) == {"up": True}
            during.extend(path.name for path in scratch.glob("*/session_*"))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        replace(meeting_of("5.0.0"), port=port).write(tmp_path / "ray.json")
        leader = threading.Thread(target=play_leader, args=(listener,))
        leader.start()
        assert follow(tmp_path) == 0
        leader.join()
    assert during == ["session_1"]
    assert list(scratch.iterdir()) == []


@pytest.mark.slow
def test_a_ray_that_does_not_start_is_told_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_module, "START_TRIES", 2)
    process = RayProcess(["--bad"], address=own_address(), log=tmp_path / "log", token="x")
    with ExitStack() as stack:
        stack.callback(process.kill)
        with pytest.raises(StepFailed, match="--bad"):
            _until_started(process)
    assert capsys.readouterr().err.count("tried again") == 1


def _until_started(process: RayProcess) -> None:
    while not process.started():
        time.sleep(0.1)


class Step:
    """Two tasks of one step, whose driver is `DRIVER`."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        # Not in `folder`, since the paths of Ray's sockets have to be short.
        self.ray_folder = Path(stack.enter_context(tempfile.TemporaryDirectory("", "r", "/tmp")))
        (folder / "driver.py").write_text(DRIVER)
        self.leader = self._start(0, LEAD, str(folder / "driver.py"), str(folder))
        self.follower = self._start(1, FOLLOW)

    def _start(self, task: int, code: str, *more: str) -> subprocess.Popen[bytes]:
        variables = {
            "SLURM_JOB_ID": "5",
            "SLURM_STEP_ID": "0",
            "SLURM_CPUS_ON_NODE": "2",
            "RAY_TMPDIR": str(self.ray_folder),
        }
        with (self.folder / f"task{task}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(self.folder), *more],
                env={**os.environ, **variables, "SLURM_PROCID": str(task)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def wait_ready(self) -> list[int]:
        """Pids of the ranks, one on each machine."""

        def ready() -> bool:
            assert self.leader.poll() is None, self.logs()
            return (self.folder / "ready").exists()

        wait_until(ready, "the ranks are ready", 400, details=self.logs)
        time.sleep(0.2)
        return [int(pid) for pid in (self.folder / "ready").read_text().split()]

    def logs(self) -> str:
        return "\n".join((self.folder / f"task{n}.log").read_text() for n in (0, 1))


@pytest.mark.long
def test_two_machines_one_ray_and_an_end_that_ranks_outlive(tmp_path: Path) -> None:
    with ExitStack() as stack:
        step = Step(tmp_path, stack)
        ranks = step.wait_ready()
        assert stat.S_IMODE((tmp_path / "ray.json").stat().st_mode) == 0o600
        for pid in ranks:  # SLURM signals every process of a step
            os.kill(pid, signal.SIGTERM)
        for task in (step.follower, step.leader, step.leader):
            task.send_signal(signal.SIGUSR1)
        assert step.leader.wait(timeout=120) == 7, step.logs()
        assert step.follower.wait(timeout=60) == 0, step.logs()
        assert "words of a rank" in (tmp_path / "task0.log").read_text()  # which is the job's log
        assert not (tmp_path / "ray.json").exists()
        for pid in ranks:
            assert not Path(f"/proc/{pid}").exists()
        assert list(step.ray_folder.iterdir()) == []
