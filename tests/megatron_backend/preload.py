"""Imported once by the fork server, so that each rank's process starts with Megatron in memory."""

from megatron_backend.runtime.distributed import prepare

prepare()

from megatron_backend.models import export, weights  # noqa: E402, F401
from megatron_backend.training import step  # noqa: E402, F401
