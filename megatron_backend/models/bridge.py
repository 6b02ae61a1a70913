"""Weights of families that have no mapping here, in and out through Megatron-Bridge.

Optional: its packages are in no requirement of this one. It knows some dozens of families, and
builds them of Transformer Engine's layers, which compute on CUDA only. Weights go both ways
wherever those layers can be made. It brings its own description of a model, so what is built here
is a `GPTModel` that this package can export again, and no more: nothing else here knows what such a
family is, and jobs do not train it.
"""

import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors.torch import save_file
from torch import Tensor

from megatron_backend.models.tensors import SafetensorsFolder
from service.spec.layout import Layout

REQUIRED = {
    "transformer_engine.pytorch": "transformer-engine[pytorch]",
    "megatron.bridge": "megatron-bridge",
}
"""What is imported, and the package that has it."""


class BridgeMissing(ImportError):
    """A package is not installed; the message says which, and what it is for."""


class UnknownToBridge(ValueError):
    """Megatron-Bridge does not know the family of this model either."""


class BridgedModel:
    """A model whose weights Megatron-Bridge converts.

    Its matrices hold anything at all until `load`.

    Args:
        folder: Hugging Face files: config.json and safetensors.
        layout: of the ranks, which must have joined it. Virtual stages are not supported.
        dtype: of parameters.

    Attributes:
        chunks: this rank's part, a list as everywhere in this package.

    Raises:
        BridgeMissing: see there.
        UnknownToBridge: see there.
        ValueError: the layout has virtual stages.
    """

    def __init__(self, folder: Path, layout: Layout, *, dtype: torch.dtype) -> None:
        if layout.vpp > 1:
            raise ValueError(f"vpp = {layout.vpp}: Megatron-Bridge's models have no chunks here")
        self._folder = folder
        self._bridge = _bridge_of(folder)
        provider = self._bridge.to_megatron_provider(load_weights=False)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        _fit(provider, layout, dtype, groups)
        self._vocab_size = provider.vocab_size
        stage = groups.pp.rank()
        self.chunks: list[GPTModel] = [
            provider.provide(pre_process=stage == 0, post_process=stage == layout.pp - 1)
        ]

    def load(self) -> None:
        """Fills this rank's part from the folder. Every rank must call it.

        Raises:
            ValueError: a tensor has another shape than the model.
        """
        with torch.no_grad():
            self._bridge.load_hf_weights(self.chunks)

    def export(self, target: Path) -> None:
        """Writes the same files as the folder has, with the weights as they are now, each in the
        number format that it has there.

        Every rank must call it; rank 0 writes, and holds a file's tensors until it has them all.

        Raises:
            ValueError: Megatron-Bridge gives other tensors than the folder has.
        """
        source = SafetensorsFolder(self._folder)
        missing: dict[str, set[str]] = {}
        for name, file in source.file_of.items():
            missing.setdefault(file, set()).add(name)
        held: dict[str, dict[str, Tensor]] = {file: {} for file in missing}
        if torch.distributed.get_rank() == 0:
            target.mkdir(parents=True, exist_ok=True)
            for path in self._folder.iterdir():
                if path.is_file() and path.name not in missing:
                    shutil.copy(path, target / path.name)
        # All ranks go through all tensors: each is gathered from those that have a part of it.
        for name, tensor in self._tensors():
            if name not in source or torch.distributed.get_rank() != 0:
                continue
            file, dtype = source.file_of[name], source.read(name, stop=0).dtype
            held[file][name] = tensor.to(dtype).contiguous()
            missing[file].discard(name)
            if not missing[file]:
                save_file(held.pop(file), target / file, metadata={"format": "pt"})
        if torch.distributed.get_rank() == 0 and held:
            names = ", ".join(sorted(name for file in held for name in missing[file])[:5])
            raise ValueError(f"Megatron-Bridge gave no {names}, which {self._folder} has")
        torch.distributed.barrier()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by Hugging Face's names, without the vocabulary's padding."""
        padded, size = self.chunks[0].vocab_size, self._vocab_size
        for name, tensor in self._bridge.export_hf_weights(
            self.chunks, cpu=True, show_progress=False
        ):
            yield name, tensor[:size] if len(tensor) == padded else tensor


def _bridge_of(folder: Path) -> Any:
    for module, package in REQUIRED.items():
        try:
            import_module(module)
        except ImportError as error:
            raise BridgeMissing(
                f"{folder}: its family has no mapping here, and {module} cannot be imported "
                f"({error}); install {package} to convert its weights with Megatron-Bridge"
            ) from error
    from megatron.bridge import AutoBridge

    try:
        return AutoBridge.from_hf_pretrained(folder)
    except ValueError as error:
        raise UnknownToBridge(f"{folder}: Megatron-Bridge cannot convert it: {error}") from error


def _fit(provider: Any, layout: Layout, dtype: torch.dtype, groups: ProcessGroupCollection) -> None:
    """Brings Megatron-Bridge's description of the model to a layout and a number format."""
    settings = {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "context_parallel_size": layout.cp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.tp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "should_pad_vocab": True,
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "gradient_accumulation_fusion": False,
        "_pg_collection": groups,
    }
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
