"""Which tensor of an export goes into which file, and which ranks make it of which parameter.

Every rank makes the same plan, so that all of them gather and send in the same order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megatron_backend.models.cuts import Cut, Shape
from megatron_backend.models.mapping import cut_of
from megatron_backend.models.tensors import SINGLE_FILE
from megatron_backend.models.weights import first_expert, first_layer, output_weight_is_copy
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """The parameter that some tensors are made of.

    Attributes:
        rank: tensor-parallel rank 0 of those that hold it.
        chunk: number of the chunk on those ranks.
        parameter: its name in the chunk.
        cut: what it is made of.
    """

    rank: int
    chunk: int
    parameter: str
    cut: Cut


def plan_makers(
    chunks: Sequence[GPTModel], config: ModelConfig, layout: Layout
) -> dict[str, Maker]:
    """Who makes each tensor, by Hugging Face name. Every rank must call it.

    Raises:
        KeyError: no tensor is mapped to a parameter.
    """
    mine = [
        (first_layer(chunk), first_expert(chunk, config), _exported_names(chunk))
        for chunk in chunks
    ]
    of_rank: list[Any] = [None] * layout.world_size
    torch.distributed.all_gather_object(of_rank, mine)
    makers: dict[str, Maker] = {}
    for rank in range(0, layout.world_size, layout.tp):
        for number, (layer, expert, names) in enumerate(of_rank[rank]):
            for name in names:
                cut = cut_of(
                    config, name, first_layer=layer, first_expert=expert, head=chunks[0].head
                )
                maker = Maker(rank=rank, chunk=number, parameter=name, cut=cut)
                for tensor in cut.names:
                    makers.setdefault(tensor, maker)
    return makers


def _exported_names(chunk: GPTModel) -> list[str]:
    return [
        name
        for name, _ in chunk.named_parameters()
        if name != "output_layer.weight" or not output_weight_is_copy(chunk)
    ]


def plan_files(
    shapes: Mapping[str, Shape],
    *,
    element_size: int,
    max_file_bytes: int,
    like: Mapping[str, str] | None = None,
) -> dict[str, list[str]]:
    """The names of the tensors in each file.

    Args:
        shapes: of all tensors, bottom to top.
        element_size: bytes of one number.
        max_file_bytes: a file is begun where the next tensor would make it larger.
        like: the files that the tensors came from, to write the same ones; a tensor that is new
            goes to the one before it. None fills files up.
    """
    files: dict[str, list[str]] = {}
    if like is not None:
        file = SINGLE_FILE
        for name in shapes:
            file = like.get(name, file)
            files.setdefault(file, []).append(name)
        return dict(sorted(files.items()))
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        grown = torch.Size(shape).numel() * element_size
        if groups[-1] and size + grown > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += grown
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }
