"""Fixtures that all tests of the Megatron backend share."""

from collections.abc import Iterator

import pytest

from tests.megatron_backend.ranks import Ranks


@pytest.fixture(scope="session")
def pool() -> Ranks:
    """Where a session's ranks come from: one process that has imported Megatron."""
    return Ranks()


@pytest.fixture(scope="module")
def ranks(pool: Ranks) -> Iterator[Ranks]:
    """Processes that play ranks; see `tests.megatron_backend.ranks`."""
    yield pool
    pool.close()
