"""Transformer Engine's own modules on a CPU: they can be made and asked, and cannot compute.

They refuse to be made where torch sees no CUDA. The CPU runtime puts "cuda" on the CPU in all of
torch's factories, so if torch says for a moment that CUDA is there, they come out whole, with the
parameters, names and shardings that they have on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from service.spec import Fp8Spec
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig


@contextmanager
def cuda_seems_present() -> Iterator[None]:
    """Torch says that there is CUDA, and every device of it is the CPU."""
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
        mock.patch("megatron_backend.models.build.device", return_value=torch.device("cpu")),
    ):
        yield


def on_cuda(config: ModelConfig, *, fp8: Fp8Spec | None = None) -> Any:
    """The model as `build_model` makes it where CUDA is: of Transformer Engine's modules."""
    from megatron_backend.models.build import build_model

    with cuda_seems_present():
        [chunk] = build_model(config, Layout(), dtype=torch.bfloat16, fp8=fp8)
    return chunk


def on_cpu(config: ModelConfig, *, fp8: Fp8Spec | None = None) -> Any:
    """The model as `build_model` makes it without CUDA."""
    from megatron_backend.models.build import build_model

    [chunk] = build_model(config, Layout(), dtype=torch.bfloat16, fp8=fp8)
    return chunk
