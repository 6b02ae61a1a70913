"""Without its packages, Megatron-Bridge is asked for by name. With them, see transformer_engine."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks

if find_spec("transformer_engine") is not None:
    pytest.skip("Transformer Engine is installed", allow_module_level=True)


def convert(_rank: int, folder: Path) -> None:
    """What needs Megatron-Bridge."""
    from megatron_backend.models.bridge import BridgedModel

    BridgedModel(folder, Layout(), dtype=torch.bfloat16)


def test_the_error_says_what_to_install(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"install transformer-engine\[pytorch\] to convert"):
        ranks.run(Layout(), convert, tmp_path)
