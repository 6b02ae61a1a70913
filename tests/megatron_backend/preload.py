"""Imported once by the fork server, so that each rank's process starts with Megatron in memory."""

import gc

from megatron_backend.runtime.distributed import prepare

prepare()

import pytest  # noqa: E402, F401

from megatron_backend.models import export, weights  # noqa: E402, F401
from megatron_backend.training import step  # noqa: E402, F401
from tests.megatron_backend import small_models  # noqa: E402, F401
from tests.megatron_backend.training import training_runs  # noqa: E402, F401

# What was imported stays for good: collecting after each run need not look at it again.
gc.freeze()
