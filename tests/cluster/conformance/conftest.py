"""The sites, one after the other, and what each test has of one."""

import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.conformance.trial import Trial
from tests.cluster.sites.site import Ability, Site

KINDS = ("local", "slurm", "kuberay", "ray_jobs")


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(kind, marks=[] if kind == "local" else [pytest.mark.cluster]) for kind in KINDS
    ],
)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """A real cluster, up; one at a time."""
    # Its name is short, for Unix sockets, and any user may look into it, as pods' users do.
    folder = Path(tempfile.mkdtemp(prefix=f"planish-{request.param}-"))
    folder.chmod(0o755)
    module = importlib.import_module(f"tests.cluster.sites.{request.param}")
    try:
        with contextmanager(module.open_site)(folder) as opened:
            yield opened
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def needs(site: Site) -> Callable[..., None]:
    """Skips a test, with the site's reason, where the site lacks an ability."""

    def require(*abilities: Ability) -> None:
        for ability in abilities:
            if ability in site.cannot:
                pytest.skip(f"{site.kind}: {site.cannot[ability]}")

    return require


@pytest.fixture
def trial(site: Site) -> Iterator[Trial]:
    """A jobs folder of its own; all attempts in it are ended after the test."""
    with Trial.on(site) as made:
        yield made
