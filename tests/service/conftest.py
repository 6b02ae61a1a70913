from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.catalogue import Catalogue
from tests.service.model_folders import write_model
from tests.service.running_service import RunningService, start_service


@pytest.fixture(scope="session")
def catalogue() -> Catalogue:
    """The real one, asked once: listing imports every environment's library."""
    return Catalogue(timeout_seconds=120)


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model-root")
    write_model(root / "tiny")
    return root


@pytest.fixture
def new_service(
    tmp_path: Path, model_root: Path, catalogue: Catalogue
) -> Iterator[Callable[..., RunningService]]:
    """Starts services over one data folder (see `start_service`); stops them at the end."""
    started: list[RunningService] = []

    def start(**options: Any) -> RunningService:
        defaults = {"model_root": model_root, "catalogue": catalogue}
        service = start_service(tmp_path / "data", **defaults | options)
        started.append(service)
        return service

    yield start
    for service in started:
        if service.thread.is_alive():
            service.stop()


@pytest.fixture(scope="session")
def service(
    tmp_path_factory: pytest.TempPathFactory, model_root: Path, catalogue: Catalogue
) -> Iterator[RunningService]:
    """One service for all tests that can share it. Its jobs stay in the queue."""
    running = start_service(
        tmp_path_factory.mktemp("shared-service"), model_root=model_root, catalogue=catalogue
    )
    yield running
    running.stop()
