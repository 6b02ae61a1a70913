"""Settings of the property tests, and the real data set where it is there."""

from pathlib import Path

import pytest
from hypothesis import settings

# The machine may be busy, so no example has a deadline; and a failure must come again.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")

_SHARED = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """The folder with GSM8K's train.jsonl and test.jsonl."""
    if not _SHARED.is_dir():
        pytest.skip("the GSM8K files are not beside this repository")
    return _SHARED
