"""Imported once by the fork server, so that each rank's process starts with Megatron in memory."""

from megatron_backend.runtime.distributed import prepare

prepare()

import pytest  # noqa: E402, F401

from megatron_backend.models import export, weights  # noqa: E402, F401
from megatron_backend.training import step  # noqa: E402, F401
from tests.megatron_backend import small_models  # noqa: E402, F401
from tests.megatron_backend.training import training_runs  # noqa: E402, F401
