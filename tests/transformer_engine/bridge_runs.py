"""What the ranks of test_bridge.py do."""

from collections.abc import Sequence
from pathlib import Path

import torch

from service.spec.layout import Layout
from tests.transformer_engine.real_modules import cuda_seems_present


def import_bridge(_rank: int) -> None:
    """Imports what conversions need, so that later runs of the same process have it."""
    import megatron.bridge  # noqa: F401


def copy_through(_rank: int, root: Path, names: Sequence[str], layout: Layout) -> None:
    """Imports each of the models, and exports it to a folder of the layout's name."""
    from megatron_backend.models.bridge import BridgedModel

    for name in names:
        with cuda_seems_present():
            model = BridgedModel(root / name, layout, dtype=torch.bfloat16)
            forget(model.chunks)
            model.load()
            model.export(root / f"{name}-{layout}")


def forget(chunks: Sequence[torch.nn.Module]) -> None:
    """What no import fills stays NaN."""
    with torch.no_grad():
        for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
            parameter.fill_(torch.nan)
