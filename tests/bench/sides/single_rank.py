"""Our side's process as the only rank of a job, with a model in it."""

import json
from pathlib import Path
from typing import Any

from megatron_backend.runtime import distributed
from service.spec.layout import Layout
from tests.ports import free_port


def load_model(case: Path, *, max_length: int = 1024) -> tuple[Any, Any]:
    """The chunks of the case's model, and its config, in a process group of one."""
    distributed.initialize(Layout(), 0, address="127.0.0.1", port=free_port(), seed=1)
    from megatron_backend.models.build import build_model
    from megatron_backend.models.tensors import SafetensorsFolder
    from megatron_backend.models.weights import load_weights
    from service.spec.model_config import ModelConfig

    folder = case / "model"
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    chunks = build_model(config, Layout(), max_length=max_length)
    load_weights(chunks, config, SafetensorsFolder(folder))
    return chunks, config
