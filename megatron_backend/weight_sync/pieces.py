"""What a rank holds of a model, by the tensors' names in the whole model.

Megatron counts layers and experts from 0 on every rank. Here they get their numbers in the whole
model, so that a tensor has one name whatever stage, chunk or expert-parallel rank it is on.

How tensor parallelism cuts a tensor is told by its place in the layer. Megatron's own marks on a
parameter do not say it for all: Transformer Engine's experts have none.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_backend.weight_sync.plan import Piece


class _Cut(NamedTuple):
    """Along which dimension, and of how many matrices in one."""

    dim: int
    blocks: int


# Experts' weights have a number at their end where they are computed in one grouped product.
_CUTS: tuple[tuple[re.Pattern[str], _Cut], ...] = (
    (re.compile(r"(word_embeddings|output_layer)\.weight"), _Cut(0, 1)),
    (re.compile(r"linear_qkv\.(weight|bias)"), _Cut(0, 1)),
    (re.compile(r"linear_proj\.weight"), _Cut(1, 1)),
    (re.compile(r"linear_fc1\.weight\d*"), _Cut(0, 2)),
    (re.compile(r"linear_fc2\.weight\d*"), _Cut(1, 1)),
)
_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+|(?<=\.weight)\d+$")


def held_tensors(chunks: Sequence[GPTModel]) -> list[tuple[Piece, Tensor]]:
    """Every parameter and persistent buffer of a rank's model, once.

    A last stage's own copy of a tied embedding is left out: the first stage has the original.

    Raises:
        ValueError: a parameter is cut over tensor-parallel ranks in a way that is not known here.
    """
    return [held for chunk in chunks for held in _held_in(chunk)]


def plain(tensor: Tensor) -> Tensor:
    """The tensor as numbers of its `dtype`, also where Transformer Engine keeps it in 8 bits."""
    return dequantize_fp8_tensor(tensor) if is_float8tensor(tensor) else tensor.detach()


def _held_in(chunk: GPTModel) -> Iterator[tuple[Piece, Tensor]]:
    for name, tensor in _named_tensors(chunk):
        if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
            continue
        groups = chunk.pg_collection
        expert = ".experts." in name
        group = groups.expt_tp if expert else groups.tp
        cut = next((cut for end, cut in _CUTS if _ends_with(end, name)), None)
        if cut is None and getattr(tensor, "tensor_model_parallel", False) and group.size() > 1:
            raise ValueError(f"it is not known how tensor parallelism cuts {name}")
        piece = Piece(
            name=_whole_name(chunk, name), shape=tuple(tensor.shape), dtype=str(tensor.dtype)
        )
        if cut is not None:
            piece = replace(
                piece, dim=cut.dim, parts=group.size(), part=group.rank(), blocks=cut.blocks
            )
        yield piece, tensor


def _named_tensors(chunk: GPTModel) -> Iterator[tuple[str, Tensor]]:
    yield from chunk.named_parameters()
    for path, module in chunk.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _ends_with(end: re.Pattern[str], name: str) -> bool:
    return end.fullmatch(".".join(name.split(".")[-2:])) is not None


def _whole_name(chunk: GPTModel, name: str) -> str:
    name = _LAYER.sub(lambda local: str(_layer_number(chunk, int(local[0]))), name)
    if ".experts." not in name:
        return name
    group = chunk.pg_collection.ep
    first = group.rank() * (chunk.config.num_moe_experts // group.size())
    return _EXPERT.sub(lambda local: str(first + int(local[0])), name)


def _layer_number(chunk: GPTModel, local: int) -> int:
    """A layer's number in the whole model, from 0."""
    return int(chunk.decoder.layers[local].layer_number) - 1
