"""A model's starting weights, wherever the service has found them.

This module imports Megatron: ranks only.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel

from megatron_backend.checkpoint.model_weights import load_model_weights
from megatron_backend.models.cuts import TensorSource
from megatron_backend.models.mapping import head_tensor
from megatron_backend.models.tensors import RandomTensors, SafetensorsFolder, WithNewHead
from megatron_backend.models.weights import load_weights
from service.spec import ResolvedModel
from service.spec.model_config import ModelConfig


def load_resolved(
    model: Sequence[GPTModel],
    config: ModelConfig,
    resolved: ResolvedModel,
    *,
    seed: int,
    new_head: bool = False,
    prefix: str = "",
) -> None:
    """Fills this rank's part of a model. Every rank of the model must call it.

    Args:
        model: this rank's chunks, built with the head that is wanted.
        config: of the model.
        resolved: where its weights are.
        seed: of what is drawn at random.
        new_head: a value head is drawn at random where the weights are of a model that predicts
            tokens. Else these are refused: a head that was never trained says nothing.
        prefix: see `load_model_weights`.

    Raises:
        FileNotFoundError, KeyError: weights are missing.
        ValueError: they are another model's, or of one with another head.
    """
    if resolved.kind == "random":
        load_weights(model, config, RandomTensors(config, seed, model[0].head))
        return
    path = Path(str(resolved.weights))
    if resolved.kind == "checkpoint":
        if not load_model_weights(model, path, prefix=prefix):
            _check_new_head(new_head, path)
            _draw_head(model, config, seed)
        return
    folder = SafetensorsFolder(path)
    source: TensorSource = folder
    if model[0].head == "value" and head_tensor(config) not in folder:
        _check_new_head(new_head, path)
        source = WithNewHead(folder, config, seed)
    load_weights(model, config, source)


def _check_new_head(new_head: bool, path: Path) -> None:
    if not new_head:
        raise ValueError(
            f"{path} holds a model that predicts tokens, where a reward model is needed"
        )


def _draw_head(model: Sequence[GPTModel], config: ModelConfig, seed: int) -> None:
    drawn = RandomTensors(config, seed, "value").read(head_tensor(config))
    with torch.no_grad():
        for chunk in model:
            if chunk.post_process:
                chunk.output_layer.weight.copy_(drawn)
