"""podman and buildah with a storage of their own, as tests of images need them.

Containers have no network and builds have the machine's: podman's own network would turn on the
forwarding of packets and leave firewall rules behind.
"""

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
PROGRAMS = ("podman", "buildah", "runc")
BUILD_SECONDS, RUN_SECONDS = 1500, 300
ENDS_WITHIN_SECONDS = 5.0

# What a cluster with the level "restricted" and a read-only root leaves a container.
RESTRICTED = (
    "--network=none",
    "--read-only",
    "--read-only-tmpfs=false",
    "--tmpfs=/tmp",
    "--cap-drop=all",
    "--security-opt=no-new-privileges",
    "--pids-limit=1024",
    "--memory=4g",
)

# events_logger, cgroup_manager: there is no systemd to ask. Ulimits: podman's own are above what it
# may set here.
_CONTAINERS_CONF = """
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "netavark"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
"""
_STORAGE_CONF = """
[storage]
driver = "overlay"
graphroot = "{folder}/store"
runroot = "{folder}/runroot"
"""


@dataclass(frozen=True, slots=True)
class Container:
    """A container that was started."""

    engine: "Engine"
    name: str

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs a command in it."""
        return self.engine.podman("exec", self.name, *command, check=check)

    def logs(self) -> str:
        """What its process wrote, standard error too."""
        done = self.engine.podman("logs", self.name)
        return done.stdout + done.stderr

    def state(self, field: str) -> str:
        """A field of its state, such as ExitCode."""
        return self.engine.podman(
            "inspect", "--format", f"{{{{.State.{field}}}}}", self.name
        ).stdout.strip()

    def wait_until_healthy(self, seconds: float = 300.0) -> None:
        """Runs the image's health check, as an engine does, until it passes."""

        def healthy() -> bool:
            done = self.engine.podman("healthcheck", "run", self.name, check=False)
            assert done.returncode == 0 or self.state("Status") == "running", self.logs()
            return done.returncode == 0

        wait_until(healthy, f"{self.name} is healthy", seconds, details=self.logs, pause=0.3)

    def seconds_to_end(self, limit: float) -> float:
        """Sends SIGTERM to process 1; seconds until it was gone."""
        process = int(self.state("Pid"))
        begin = time.monotonic()
        # Not by podman, whose own start would be counted.
        os.kill(process, signal.SIGTERM)
        while Path(f"/proc/{process}").exists():
            assert time.monotonic() - begin < limit, self.logs()
            time.sleep(0.02)
        return time.monotonic() - begin


def assert_ends_soon(life: Callable[[], float], *, tries: int = 1) -> None:
    """A container ends within `ENDS_WITHIN_SECONDS` of SIGTERM, at one of the tries.

    Args:
        life: starts one and ends it; how long the end took, in seconds.
        tries: more than one where most of the limit goes by in waits that are not ours, so that a
            machine with more work than cores may not have enough left.
    """
    seconds: list[float] = []
    while len(seconds) < tries:
        seconds.append(life())
        if seconds[-1] < ENDS_WITHIN_SECONDS:
            return
    raise AssertionError(f"not within {ENDS_WITHIN_SECONDS} s: {seconds}")


@dataclass(frozen=True, slots=True)
class Engine:
    """podman and buildah, with all that they keep below one folder."""

    folder: Path

    @classmethod
    def open(cls, folder: Path) -> "Engine":
        """Makes the folder, or takes what an earlier run left there: images and layers."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        assert folder.stat().st_uid == os.getuid(), f"{folder} belongs to somebody else"
        (folder / "tmp").mkdir(exist_ok=True)
        (folder / "containers.conf").write_text(_CONTAINERS_CONF)
        (folder / "storage.conf").write_text(_STORAGE_CONF.format(folder=folder))
        return cls(folder)

    @property
    def environment(self) -> Mapping[str, str]:
        """What the programs read their settings from."""
        return os.environ | {
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "TMPDIR": str(self.folder / "tmp"),
        }

    def podman(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs podman; fails with its own words where `check` is set."""
        return self._run(["podman", *arguments], check=check)

    def load(self, archive: Path) -> None:
        """Takes the images of a docker-archive."""
        self.podman("load", "--quiet", "--input", str(archive))

    def save(self, tag: str, archive: Path) -> None:
        """Leaves an image as a docker-archive, which a node can load."""
        archive.unlink(missing_ok=True)
        self.podman("save", "--quiet", "--format=docker-archive", "--output", str(archive), tag)

    def build(self, image: str, tag: str, *, base: str, arguments: Mapping[str, str]) -> None:
        """Builds one of Planish's images with its own script."""
        given = [part for item in arguments.items() for part in ("--build-arg", "=".join(item))]
        command = [str(ROOT / "deploy" / "docker" / "build.sh"), image, tag]
        environment = {**self.environment, "BUILDER": "buildah", "BASE": base}
        if CA_BUNDLE.exists():
            environment["CA_BUNDLE"] = str(CA_BUNDLE)
        self._run(
            [*command, "--", "--network=host", *given],
            environment=environment,
            seconds=BUILD_SECONDS,
        )

    def context_of(self, folder: Path) -> set[str]:
        """Paths of the files that a build in `folder` is given."""
        recipe = self.folder / "context.Dockerfile"
        recipe.write_text("FROM scratch\nCOPY . /\n")
        tag = f"localhost/context:{uuid.uuid4().hex[:8]}"
        self._run(["buildah", "build", "--quiet", "--file", str(recipe), "--tag", tag, str(folder)])
        container = self._run(["buildah", "from", tag]).stdout.strip()
        try:
            mounted = Path(self._run(["buildah", "mount", container]).stdout.strip())
            return {str(p.relative_to(mounted)) for p in mounted.rglob("*") if p.is_file()}
        finally:
            self._run(["buildah", "rm", container])
            self.podman("rmi", tag)

    @contextmanager
    def container(self, tag: str, *command: str, options: tuple[str, ...]) -> Iterator[Container]:
        """A container of the image, started with these options, gone at the end."""
        name = f"planish-test-{uuid.uuid4().hex[:8]}"
        try:
            self.podman("run", "--detach", f"--name={name}", *options, tag, *command)
            yield Container(self, name)
        finally:
            self.podman("rm", "--force", "--volumes", "--time=0", name, check=False)

    def answer(self, tag: str, *command: str, options: tuple[str, ...] = RESTRICTED) -> str:
        """What a command in a fresh container of the image prints."""
        return self.podman("run", "--rm", *options, tag, *command).stdout

    def _run(
        self,
        command: list[str],
        *,
        check: bool = True,
        environment: Mapping[str, str] | None = None,
        seconds: float = RUN_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment or self.environment,
            timeout=seconds,
        )
        if check and done.returncode:
            said = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
            raise AssertionError(f"{' '.join(command)}\n{said}")
        return done


def missing() -> str | None:
    """Why images cannot be built here; None where they can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if os.getuid() != 0:
        return "images are built as root here"
    return None
