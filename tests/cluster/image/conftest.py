"""The images, built once a session from the stand-in for python:3.12-slim.

PLANISH_TEST_IMAGES names the folder that keeps layers and images between sessions; by default it is
planish-images-UID in the folder for temporary files. (To remove it: `umount FOLDER/store/overlay`,
`rm -rf FOLDER`.) PLANISH_TEST_BASE names a docker-archive with the base image, where one is there.
A session leaves FOLDER/planish-service.tar and FOLDER/planish-worker.tar, which a node can load:

    IMAGES="FOLDER/planish-service.tar FOLDER/planish-worker.tar" NODE=1 kube-up.sh BASE
    ctr --namespace k8s.io images import FOLDER/planish-service.tar      # a node that is up
"""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.cluster.image import engine as engines
from tests.cluster.image.engine import ROOT, Engine

BASE = "localhost/python:3.12-slim"
SERVICE = "localhost/planish:test"
WORKER = "localhost/planish-worker:test"
MAKE_BASE = ROOT.parent / "shared" / "cluster" / "base-image.sh"


@pytest.fixture(scope="session")
def engine() -> Engine:
    reason = engines.missing()
    if reason:
        pytest.skip(reason)
    named = os.environ.get("PLANISH_TEST_IMAGES")
    folder = Path(named or Path(tempfile.gettempdir()) / f"planish-images-{os.getuid()}")
    return Engine.open(folder.absolute())


@pytest.fixture(scope="session")
def base(engine: Engine) -> str:
    """The base image, loaded."""
    if engine.podman("image", "exists", BASE, check=False).returncode == 0:
        return BASE
    archive = Path(os.environ.get("PLANISH_TEST_BASE", engine.folder / "base.tar"))
    if not archive.exists():
        if not MAKE_BASE.exists():
            pytest.skip(f"{MAKE_BASE} is not there to make the base image")
        made = subprocess.run(
            [str(MAKE_BASE), str(archive)], capture_output=True, text=True, timeout=900
        )
        if made.returncode:
            pytest.skip(f"no base image could be made: {made.stdout[-500:]}{made.stderr[-500:]}")
    engine.load(archive)
    return BASE


@pytest.fixture(scope="session")
def service_image(engine: Engine, base: str) -> str:
    engine.build("service", SERVICE, base=base, arguments={})
    engine.save(SERVICE, engine.folder / "planish-service.tar")
    return SERVICE


@pytest.fixture(scope="session")
def worker_image(engine: Engine, base: str) -> str:
    """The form whose packages are those of a mounted environment."""
    engine.build("worker", WORKER, base=base, arguments={"PACKAGES": "mounted"})
    engine.save(WORKER, engine.folder / "planish-worker.tar")
    return WORKER
