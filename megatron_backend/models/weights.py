"""Weights into a Megatron model from Hugging Face tensors, and compared with them."""

from collections.abc import Sequence

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_backend.models.cuts import Cut, Part, TensorSource
from megatron_backend.models.mapping import cut_of
from megatron_backend.models.tensors import SafetensorsFolder
from service.spec.model_config import ModelConfig


def load_weights(chunks: Sequence[GPTModel], config: ModelConfig, source: TensorSource) -> None:
    """Fills this rank's part of the model; each rank reads only what it holds.

    Raises:
        KeyError: a tensor is missing, or a parameter has no mapping.
        ValueError: a tensor has another shape than the config says, or belongs to no such model.
    """
    if isinstance(source, SafetensorsFolder):
        source.check_complete(config, chunks[0].head)
    for chunk in chunks:
        _load_chunk(chunk, config, source)


def _load_chunk(chunk: GPTModel, config: ModelConfig, source: TensorSource) -> None:
    part = _part(chunk)
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            tensor = local_cut(chunk, config, name).load(source, config, part)
            if tensor.shape != parameter.shape:
                raise ValueError(
                    f"weights for {name}: shape {list(tensor.shape)}, "
                    f"but the config makes it {list(parameter.shape)}"
                )
            parameter.copy_(tensor)


def differing_parameter(
    chunks: Sequence[GPTModel], config: ModelConfig, source: TensorSource
) -> str | None:
    """The first parameter of this rank that `source` has otherwise, to the bit; None for none.

    Raises:
        KeyError: a tensor is missing.
    """
    for chunk in chunks:
        part = _part(chunk)
        for name, parameter in chunk.named_parameters():
            tensor = local_cut(chunk, config, name).load(source, config, part)
            if not torch.equal(tensor.to(parameter.device), parameter.detach()):
                return name
    return None


def _part(chunk: GPTModel) -> Part:
    # Experts are cut over the same tensor-parallel ranks as all else.
    groups: ProcessGroupCollection = chunk.pg_collection
    return Part(rank=groups.tp.rank(), size=groups.tp.size(), padded_vocab=chunk.vocab_size)


def local_cut(chunk: GPTModel, config: ModelConfig, name: str) -> Cut:
    """The cut of a parameter of one of this rank's chunks."""
    return cut_of(
        config,
        name,
        first_layer=first_layer(chunk),
        first_expert=first_expert(chunk, config),
        head=chunk.head,
    )


def first_layer(chunk: GPTModel) -> int:
    """Number, in the whole model, of the first layer of this chunk."""
    layers = chunk.decoder.layers
    return int(layers[0].layer_number) - 1 if len(layers) else 0


def first_expert(chunk: GPTModel, config: ModelConfig) -> int:
    """Number, among the experts of a layer, of the first one on this rank."""
    if config.moe is None:
        return 0
    group = chunk.pg_collection.ep
    return config.moe.num_experts // int(group.size()) * int(group.rank())


def output_weight_is_copy(chunk: GPTModel) -> bool:
    """True for a last stage's chunk that holds its own copy of a tied embedding."""
    return bool(chunk.share_embeddings_and_output_weights and not chunk.pre_process)
