"""Fixtures that all tests of the Megatron backend share."""

from collections.abc import Iterator

import pytest

from tests.megatron_backend.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that play ranks; see `tests.megatron_backend.ranks`."""
    pool = Ranks()
    yield pool
    pool.close()
