from collections.abc import Iterator
from pathlib import Path

import pytest

from service.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path}/planish.db")
    yield opened
    opened.close()
