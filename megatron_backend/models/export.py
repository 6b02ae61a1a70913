"""A Hugging Face folder from a model that is spread over ranks.

Tensors are sent to rank 0 one after another, in the order in which transformers saves them, and
written as soon as a file is full, so the result is the same to the byte for every layout, and rank
0 never holds more than one file's worth.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors.torch import save_file
from torch import Tensor

from megatron_backend.models.config import ModelConfig
from megatron_backend.models.mapping import Cut, cut_of
from megatron_backend.models.tensors import INDEX_FILE, SINGLE_FILE, tensor_shapes
from megatron_backend.models.weights import first_layer, output_weight_is_copy
from service.spec.layout import Layout

MAX_FILE_BYTES = 5 * 10**9
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def export_hf(
    chunks: Sequence[GPTModel],
    config: ModelConfig,
    layout: Layout,
    folder: Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes what `AutoModelForCausalLM` loads. Every rank must call it.

    Args:
        chunks: this rank's part.
        config: of the model.
        layout: of the ranks.
        folder: where rank 0 writes; made if missing.
        max_file_bytes: size above which weights go into several files with an index.
    """
    writer = None
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        writer = _Writer(folder, max_file_bytes)
    for tensors in _whole_tensors(chunks, config, layout):
        if writer is not None:
            for name, tensor in tensors.items():
                writer.add(name, tensor)
    if writer is not None:
        writer.close()
        dtype = next(chunks[0].parameters()).dtype
        _write_configs(config, folder, dtype=_DTYPE_NAMES[dtype])
    torch.distributed.barrier()


def _whole_tensors(
    chunks: Sequence[GPTModel], config: ModelConfig, layout: Layout
) -> Iterator[dict[str, Tensor]]:
    """On rank 0 each parameter's whole tensors, in order; on the others empty dicts, in step."""
    place = layout.coordinates(torch.distributed.get_rank())
    stages = _cuts_of_stages(chunks, config, layout)
    # Tokens go through the first chunks of all stages, then through the second ones, and so on.
    for number in range(layout.vpp):
        for stage in range(layout.pp):
            parameters = dict(chunks[number].named_parameters())
            for name, cut in stages[stage][number]:
                tensors: dict[str, Tensor] = {}
                if place.pp == stage and place.dp == place.cp == 0:
                    tensors = cut.unite(_gather(parameters[name].detach()), config)
                yield _to_rank_zero(tensors, cut, config, parameters, layout.rank(pp=stage))


def _cuts_of_stages(
    chunks: Sequence[GPTModel], config: ModelConfig, layout: Layout
) -> list[list[list[tuple[str, Cut]]]]:
    """Name and cut of every parameter of each chunk of each pipeline stage, in order, the same on
    every rank."""
    mine = [
        (
            first_layer(chunk),
            [
                name
                for name, _ in chunk.named_parameters()
                if name != "output_layer.weight" or not output_weight_is_copy(chunk)
            ],
        )
        for chunk in chunks
    ]
    of_rank: list[Any] = [None] * layout.world_size
    torch.distributed.all_gather_object(of_rank, mine)
    return [
        [
            [(name, cut_of(config, name, first_layer=first)) for name in names]
            for first, names in of_rank[layout.rank(pp=stage)]
        ]
        for stage in range(layout.pp)
    ]


def _gather(parameter: Tensor) -> list[Tensor]:
    """The parts of all tensor-parallel ranks, in order."""
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(parameter) for _ in range(group.size())]
    torch.distributed.all_gather(parts, parameter.contiguous(), group=group)
    return parts


def _to_rank_zero(
    tensors: dict[str, Tensor],
    cut: Cut,
    config: ModelConfig,
    like: dict[str, Tensor],
    source: int,
) -> dict[str, Tensor]:
    """Brings whole tensors from rank `source` to rank 0."""
    rank = torch.distributed.get_rank()
    if rank == 0 and source == 0:
        return tensors
    if rank == source:
        for name in cut.names:
            torch.distributed.send(tensors[name].contiguous(), dst=0)
    if rank != 0:
        return {}
    shapes, sample = tensor_shapes(config), next(iter(like.values()))
    received = {name: sample.new_empty(shapes[name]) for name in cut.names}
    for tensor in received.values():
        torch.distributed.recv(tensor, src=source)
    return received


class _Writer:
    """Fills safetensors files up to a size; one file keeps the plain name, several get an index."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self._folder, self._limit = folder, max_file_bytes
        self._open: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes one whole tensor."""
        size = sum(t.nbytes for t in self._open.values())
        if self._open and size + tensor.nbytes > self._limit:
            self._flush()
        self._open[name] = tensor.cpu().contiguous()
        self._bytes += tensor.nbytes

    def close(self) -> None:
        """Writes what is left, and gives the files their names."""
        self._flush()
        count = len(self._files)
        if count == 1:
            self._part(0).rename(self._folder / SINGLE_FILE)
            return
        weight_map = {}
        for number, names in enumerate(self._files):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"

    def _flush(self) -> None:
        save_file(self._open, self._part(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(self._open))
        self._open = {}


def _write_configs(config: ModelConfig, folder: Path, *, dtype: str) -> None:
    """config.json as it was read, but for the number format, and how to generate."""
    architectures = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    written = {
        "architectures": [architectures[config.family] + "ForCausalLM"],
        **{name: value for name, value in config.hf.items() if name != "torch_dtype"},
        "dtype": dtype,
        "vocab_size": config.vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation = {name: config.hf[name] for name in tokens if config.hf.get(name) is not None}
    text = json.dumps(generation, indent=2, sort_keys=True) + "\n"
    (folder / "generation_config.json").write_text(text)
