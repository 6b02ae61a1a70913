"""What the images hold, in each of their layers: nothing of the machine that built them.

A file that a later layer hides is still handed to everybody, so archives are read, not containers.
"""

import mmap
import re
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import certifi
import pytest

from tests.cluster.image import archive
from tests.cluster.image.archive import Image
from tests.cluster.image.conftest import BASE
from tests.cluster.image.engine import CA_BUNDLE, ROOT, Engine

# A build takes minutes on a busy machine.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

# What a package manager and `useradd` change; the rest of ours is below /opt/planish.
SYSTEM = re.compile(
    r"etc/(\.pwd\.lock|group|gshadow|passwd|shadow|subgid|subuid)-?"
    r"|var/cache/apt/archives/lock|var/lib/dpkg/.*|var/log/(apt/.*|dpkg\.log)|var/cache/debconf/.*|var/lib/apt/extended_states"
    r"|usr/bin/tini(-static)?|usr/share/(doc|man|lintian)/.*"
    # Where engines mount files of the machine while they build, each empty.
    r"|etc/(hostname|hosts|resolv\.conf)"
)
NEVER = re.compile(
    r"(^|/)(\.git|\.cache|\.netrc|\.ssh|id_rsa[^/]*|pip\.conf|\.env|[^/]*\.deb|kubeconfig"
    r"|connection\.json)(/|$)|ca-certificates\.crt|^var/lib/apt/lists/.|^root/|^build/"
    r"|site-packages/(tests|scripts|deploy|quickstart)/|(^|/)test_(service|dockerfiles)"
)


@dataclass(frozen=True, slots=True)
class Built:
    """An image and the archive that it was read from."""

    image: Image
    path: Path


@pytest.fixture(scope="module", params=["service", "worker"])
def built(request: pytest.FixtureRequest, engine: Engine, base: str) -> Built:
    assert base == BASE
    request.getfixturevalue(f"{request.param}_image")
    plain = engine.folder / "base-alone.tar"
    engine.save(BASE, plain)
    path = engine.folder / f"planish-{request.param}.tar"
    return Built(archive.read(path, plain), path)


def foreign_certificates() -> Iterator[bytes]:
    """A line of each certificate that this machine trusts and certifi does not."""
    if not CA_BUNDLE.exists():
        return
    known = Path(certifi.where()).read_bytes()
    for block in CA_BUNDLE.read_bytes().split(b"-----BEGIN CERTIFICATE-----")[1:]:
        line = block.split()[1]
        if line not in known:
            yield line


def test_its_files_are_planish_s_own_and_few_of_the_system(built: Built) -> None:
    names = [member.name.removeprefix("./") for member in built.image.files]
    assert len(names) > 400
    strange = [n for n in names if not n.startswith("opt/planish/") and not SYSTEM.fullmatch(n)]
    assert strange == []
    assert [name for name in names if NEVER.search(name)] == []


def test_files_that_engines_mount_over_are_empty(built: Built) -> None:
    mounted = {"etc/hostname", "etc/hosts", "etc/resolv.conf"}
    assert {m.size for m in built.image.files if m.name in mounted} <= {0}


def test_nobody_can_change_or_gain_by_a_file(built: Built) -> None:
    wrong = [
        member.name
        for member in built.image.files
        if not member.issym() and member.mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IWOTH)
    ]
    assert wrong == []
    ours = [m for m in built.image.files if m.name.startswith("opt/planish/")]
    assert {member.uid for member in ours} == {0}


def test_no_byte_tells_of_the_machine_that_built_it(built: Built) -> None:
    # The base is the machine's own work here, so what it says already is not ours to answer for.
    needles = {str(ROOT).encode(), str(built.path.parent).encode(), *foreign_certificates()}
    if len(socket.gethostname()) > 6:
        needles.add(socket.gethostname().encode())
    with built.path.open("rb") as file, (built.path.parent / "base-alone.tar").open("rb") as plain:
        here = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        there = mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ)
        # A line that is in both images, to see that what is in there would be found.
        assert here.find(b"planish = service.cli:main") > 0
        found = [n for n in needles if here.find(n) >= 0 and there.find(n) < 0]
    assert found == []


def test_its_settings_are_those_of_the_dockerfile(built: Built) -> None:
    config = built.image.config["config"]
    assert config["User"] == "10001:10001"
    names = {variable.split("=")[0] for variable in config["Env"]}
    service = built.path.name == "planish-service.tar"
    own = set() if service else {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"}
    assert names == {"PATH", "HOME", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", *own}
    assert config["Healthcheck"]["Test"][0] == ("CMD" if service else "NONE")
    # Paths, not shells: process 1 is what gets the signals.
    assert config["Entrypoint"] == (["planish"] if service else ["tini", "-g", "--"])
