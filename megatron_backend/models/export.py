"""A Hugging Face folder from a model that is spread over ranks.

Each parameter is gathered, sent to rank 0, and written to its place in its file before the next one
comes, so rank 0 never holds more than one parameter's tensors beyond its own model. Files, order
and bytes are the same for every layout: those of the model that training began with, where that
came in several files.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_backend.models.export_plan import Maker, plan_files, plan_makers
from megatron_backend.models.families import FAMILIES
from megatron_backend.models.mapping import tensor_shapes
from megatron_backend.models.safetensors_file import SafetensorsFile
from megatron_backend.models.tensors import INDEX_FILE, SINGLE_FILE
from service.spec.algorithm import Head
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig

MAX_FILE_BYTES = 5 * 10**9
# As transformers says num_labels = 1.
_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
_DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def export_hf(
    chunks: Sequence[GPTModel],
    config: ModelConfig,
    layout: Layout,
    folder: Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    like: Mapping[str, str] | None = None,
) -> None:
    """Writes what `AutoModelForCausalLM` loads, or `AutoModelForSequenceClassification` where the
    model has a value head. Every rank must call it.

    Args:
        chunks: this rank's part.
        config: of the model.
        layout: of the ranks.
        folder: where rank 0 writes; made if missing.
        max_file_bytes: size above which weights go into several files with an index.
        like: the file of each tensor in the folder that the model came from
            (`SafetensorsFolder.file_of`), to write the same files; None fills files up.

    Raises:
        RuntimeError: the ranks hold other tensors than the model has; nothing was written.
    """
    shapes = tensor_shapes(config, chunks[0].head)
    makers = plan_makers(chunks, config, layout)
    if makers.keys() != shapes.keys():
        odd = sorted(makers.keys() ^ shapes.keys())
        raise RuntimeError(f"the ranks and the model's config do not agree on {', '.join(odd[:5])}")
    dtype = next(chunks[0].parameters()).dtype
    files = plan_files(
        shapes, element_size=dtype.itemsize, max_file_bytes=max_file_bytes, like=like
    )
    writes = torch.distributed.get_rank() == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    for file, names in files.items():
        wanted = {name: shapes[name] for name in names}
        target = SafetensorsFile(folder / file, wanted, dtype) if writes else None
        for tensors in _whole_tensors(chunks, config, layout, [makers[name] for name in names]):
            for name in tensors.keys() & wanted.keys():
                if target is not None:
                    target.write(name, tensors[name])
            tensors.clear()
        if target is not None:
            target.close()
    if writes:
        _write_index(folder, files, shapes, dtype)
        _write_configs(config, folder, dtype=_DTYPE_NAMES[dtype], head=chunks[0].head)
    torch.distributed.barrier()


def _whole_tensors(
    chunks: Sequence[GPTModel], config: ModelConfig, layout: Layout, makers: Sequence[Maker]
) -> Iterator[dict[str, Tensor]]:
    """On rank 0 the whole tensors of each maker, once; on the others empty dicts, in step."""
    rank = torch.distributed.get_rank()
    parameters = [dict(chunk.named_parameters()) for chunk in chunks]
    like = next(iter(parameters[0].values()))
    for maker in dict.fromkeys(makers):
        makes = maker.rank <= rank < maker.rank + layout.tp
        # Tensors get no name here: it would keep them until after the next parameter's making.
        yield _to_rank_zero(
            _unite(parameters[maker.chunk][maker.parameter], maker, config, layout.tp)
            if makes
            else {},
            maker,
            config,
            like=like,
        )


def _unite(parameter: Tensor, maker: Maker, config: ModelConfig, tp: int) -> dict[str, Tensor]:
    """A maker's whole tensors on its first rank; nothing on the others of its group."""
    parts = _gather(parameter.detach().contiguous(), maker.rank, tp)
    return maker.cut.unite(parts, config) if parts else {}


def _gather(parameter: Tensor, first: int, tp: int) -> list[Tensor]:
    """The parts of the `tp` ranks from `first` on, in order, on that one; nothing on the others.

    A collective would be shorter, but gloo's keeps a second copy of everything.
    """
    if torch.distributed.get_rank() != first:
        torch.distributed.send(parameter, dst=first)
        return []
    parts = [parameter]
    for rank in range(first + 1, first + tp):
        parts.append(torch.empty_like(parameter))
        torch.distributed.recv(parts[-1], src=rank)
    return parts


def _to_rank_zero(
    tensors: dict[str, Tensor], maker: Maker, config: ModelConfig, *, like: Tensor
) -> dict[str, Tensor]:
    """Brings whole tensors from the maker's first rank to rank 0."""
    rank = torch.distributed.get_rank()
    if rank == maker.rank == 0:
        return tensors
    if rank == maker.rank:
        for name in maker.cut.names:
            torch.distributed.send(tensors[name].contiguous(), dst=0)
    if rank != 0:
        return {}
    shapes = maker.cut.shapes(config)
    received = {name: like.new_empty(shapes[name]) for name in maker.cut.names}
    for tensor in received.values():
        torch.distributed.recv(tensor, src=maker.rank)
    return received


def _write_index(
    folder: Path,
    files: Mapping[str, Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> None:
    """What tensor is in which file, as transformers writes it; none for a single file."""
    if list(files) == [SINGLE_FILE]:
        return
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    index = {
        "metadata": {"total_parameters": count, "total_size": count * dtype.itemsize},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_configs(config: ModelConfig, folder: Path, *, dtype: str, head: Head) -> None:
    """config.json as it was read, but for the number format and the head, and how to generate."""
    family = FAMILIES[config.family]
    written = {
        "architectures": [family.architecture],
        **{name: value for name, value in config.hf.items() if name != "torch_dtype"},
        "dtype": dtype,
        "vocab_size": config.vocab_size,
    }
    if head == "value":
        written |= {"architectures": [family.classifier], **_ONE_LABEL}
    (folder / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    if head == "value":
        return
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation = {name: config.hf[name] for name in tokens if config.hf.get(name) is not None}
    text = json.dumps(generation, indent=2, sort_keys=True) + "\n"
    (folder / "generation_config.json").write_text(text)
