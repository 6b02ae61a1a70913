"""Which Megatron parameter is made of which Hugging Face tensors.

A parameter is looked up by its name in the model, in its family's table (`models/families`). The
same table imports, exports, gives every tensor's shape, and places new random weights, which
therefore depend on the seed and not on the layout.

Experts have two kinds of names in Megatron: `experts.local_experts.3.linear_fc1.weight` where they
are computed one after another, `experts.linear_fc1.weight3` where Transformer Engine computes all
of a rank's in one product. Both count the rank's own experts, and read the same tensors.
"""

import re
from collections.abc import Iterator

from megatron_backend.models.cuts import Cut, Shape
from megatron_backend.models.families import FAMILIES
from service.spec.algorithm import Head
from service.spec.model_config import ModelConfig

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_SEQUENTIAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12]\.weight)(\d+)")


def cut_of(
    config: ModelConfig,
    name: str,
    *,
    first_layer: int = 0,
    first_expert: int = 0,
    head: Head = "vocabulary",
) -> Cut:
    """The cut of one parameter.

    Args:
        config: the model.
        name: the parameter's name in a chunk of the model, where layers and experts count from 0.
        first_layer: number of the chunk's first layer in the whole model.
        first_expert: number of the rank's first expert among all experts of a layer.
        head: what the model says of a token.

    Raises:
        KeyError: no tensor is mapped to this parameter.
    """
    family = FAMILIES[config.family]
    layer = _LAYER.fullmatch(name)
    if layer is None:
        ends = {
            "embedding.word_embeddings.weight": family.embedding,
            "decoder.final_layernorm.weight": family.final_norm,
            "output_layer.weight": _end(config, head) or family.embedding,
        }
        cut, expert = ends.get(name), 0
    else:
        key, expert = _expert(layer[2])
        cut = family.layer.get(key)
    if cut is None:
        raise KeyError(f"no Hugging Face tensor is mapped to Megatron's parameter {name!r}")
    number = first_layer + int(layer[1]) if layer is not None else 0
    return cut.at(layer=number, expert=first_expert + expert)


def _expert(name: str) -> tuple[str, int]:
    """A layer's parameter as tables name it, and which of the rank's experts it belongs to."""
    if found := _SEQUENTIAL_EXPERT.fullmatch(name):
        return f"mlp.experts.{found[2]}", int(found[1])
    if found := _GROUPED_EXPERT.fullmatch(name):
        return f"mlp.experts.{found[1]}", int(found[2])
    return name, 0


def tensor_shapes(config: ModelConfig, head: Head = "vocabulary") -> dict[str, Shape]:
    """Name and shape of every tensor that transformers saves for this model, bottom to top."""
    shapes: dict[str, Shape] = {}
    for cut in _all_cuts(config, head):
        shapes.update(cut.shapes(config))
    return shapes


def head_tensor(config: ModelConfig) -> str:
    """Name of the tensor that a model with a value head has beside one that predicts tokens."""
    return FAMILIES[config.family].score.names[0]


def _end(config: ModelConfig, head: Head) -> Cut | None:
    """The output layer, unless it is the embedding."""
    family = FAMILIES[config.family]
    if head == "value":
        return family.score
    return None if config.tied else family.output


def _all_cuts(config: ModelConfig, head: Head) -> Iterator[Cut]:
    family = FAMILIES[config.family]
    yield family.embedding
    for layer in range(config.num_layers):
        for name, cut in family.layer.items():
            experts = config.moe.num_experts if config.moe and "experts" in name else 1
            for expert in range(experts):
                yield cut.at(layer=layer, expert=expert)
    yield family.final_norm
    if (end := _end(config, head)) is not None:
        yield end
