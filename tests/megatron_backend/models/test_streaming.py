"""Imports and exports hold little of a model at a time, however large it is."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_backend.models.tensors import SafetensorsFolder
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import read_config

MMAP_THRESHOLD = -3
"""glibc's name for the size from which on memory is asked of the system (malloc.h)."""
SHARD_BYTES = 40_000_000
CONFIG: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 64,
}


def status(name: str) -> int:
    """Bytes of memory of this process, as Linux counts them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def peak_bytes(action: Callable[[], object]) -> int:
    """How far the process's memory, mapped files included, rises above where it was.

    The CPU runtime keeps memory that is free. Here it goes back at once, as on a GPU's host, and
    first of all what is kept already: what is put there would not be seen.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, 2**17)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # sets the highest mark to where it is now
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def import_and_export(_rank: int, source: Path, target: Path, layout: Layout) -> list[int]:
    """Peaks of an import, an export, and of reading all files at once."""
    from megatron_backend.models.build import build_model
    from megatron_backend.models.export import export_hf
    from megatron_backend.models.weights import load_weights

    config = ModelConfig.from_hf(read_config(source))
    folder = SafetensorsFolder(source)
    chunks = build_model(config, layout)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.fill_(1.0)  # memory that nothing was written to is not there yet
    whole = peak_bytes(
        lambda: [
            tensor.clone()
            for path in source.glob("*.safetensors")
            for tensor in load_file(path).values()
        ]
    )
    for _ in range(2):  # the first time libraries are brought into memory as well
        imported = peak_bytes(lambda: load_weights(chunks, config, folder))
        exported = peak_bytes(
            lambda: export_hf(chunks, config, layout, target, like=folder.file_of)
        )
    return [imported, exported, whole]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_less_than_one_and_a_half_files_are_in_memory(
    ranks: Ranks, tmp_path: Path, layout: Layout
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    model.save_pretrained(source, max_shard_size=SHARD_BYTES)
    files = sorted(source.glob("*.safetensors"))
    largest = max(file.stat().st_size for file in files)
    assert len(files) > 2
    for imported, exported, whole in ranks.run(layout, import_and_export, source, target, layout):
        assert whole > 1.5 * largest, "the measure must see a whole model"
        assert imported < 1.5 * largest
        assert exported < 1.5 * largest
    for file in files:
        assert (target / file.name).read_bytes() == file.read_bytes()
