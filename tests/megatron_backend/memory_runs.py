"""What the ranks of the memory test do: train one step, and weigh everything that it keeps."""

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from algorithms.batch import Batch, Normalizer
from megatron_backend.precision import torch_dtype
from service.spec import JobSpec
from service.spec.layout import Layout

if TYPE_CHECKING:
    from megatron_backend.training.step import Trainer


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """Bytes on one rank."""

    parameters: int
    """A number, not bytes."""
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """The most that was saved for backward passes at any moment."""


class SavedTensors:
    """Counts the bytes that autograd holds, each piece of memory once, through its own hooks."""

    def __init__(self, parameters: set[int]) -> None:
        self._holders: dict[int, int] = {}
        self._parameters = parameters
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> "_Held":
        return _Held(self, tensor)

    def add(self, storage: int, size: int) -> None:
        if storage in self._parameters:
            return
        self._holders[storage] = self._holders.get(storage, 0) + 1
        if self._holders[storage] == 1:
            self.now += size
            self.most = max(self.most, self.now)

    def drop(self, storage: int, size: int) -> None:
        if storage in self._parameters:
            return
        self._holders[storage] -= 1
        if not self._holders[storage]:
            self.now -= size


class _Held:
    """One saved tensor; it is gone from the count when autograd lets go of it."""

    def __init__(self, counter: SavedTensors, tensor: Tensor) -> None:
        self._counter, self.tensor = counter, tensor
        storage = tensor.untyped_storage()
        self._place, self._size = storage.data_ptr(), storage.nbytes()
        counter.add(self._place, self._size)

    def __del__(self) -> None:
        self._counter.drop(self._place, self._size)


def full_batch(rows: int, length: int, vocabulary: int, *, unit: int = 1) -> Batch:
    """Rows of so many sequences that are as long as they can be, every token trained."""
    generator = torch.Generator().manual_seed(1)
    sequences = rows * unit
    mask = torch.ones(sequences, length)
    mask[:, 0] = 0
    return Batch(
        tokens=torch.randint(0, vocabulary, (sequences, length), generator=generator),
        lengths=torch.full((sequences,), length),
        loss_mask=mask,
        per_token={},
        per_sequence={},
        unit=unit,
    )


def weigh(_rank: int, layout: Layout, cases: list[tuple[dict[str, Any], JobSpec]]) -> list[Weighed]:
    """One step of each case, a model config and the job that trains it."""
    return [_weigh(layout, config, spec) for config, spec in cases]


def _weigh(layout: Layout, config: dict[str, Any], spec: JobSpec) -> Weighed:
    trainer = _trainer(layout, config, spec)
    parameters = [p for chunk in trainer.chunks for p in chunk.parameters()]
    counter = SavedTensors({p.untyped_storage().data_ptr() for p in parameters})
    training, unit = spec.training, spec.algorithm.sequences_per_row
    batch = full_batch(
        training.global_batch_size, training.max_length, config["vocab_size"], unit=unit
    )
    with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda held: held.tensor):
        trainer.train_step(batch, Normalizer.of(batch), learning_rate=1e-3)
    buffers = [b for c in trainer.chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    return Weighed(
        parameters=sum(p.numel() for p in parameters),
        weights=sum(p.nbytes for p in parameters),
        gradients=sum(buffer.grad_data.nbytes for buffer in buffers),
        optimizer=_optimizer_bytes(trainer),
        activations=counter.most,
    )


def _trainer(layout: Layout, config: dict[str, Any], spec: JobSpec) -> "Trainer":
    from algorithms.algorithm import load_algorithm
    from megatron_backend.models.build import build_model
    from megatron_backend.models.tensors import RandomTensors
    from megatron_backend.models.weights import load_weights
    from megatron_backend.training.step import Trainer
    from service.spec.model_config import ModelConfig

    model_config = ModelConfig.from_hf(config)
    dtype = torch_dtype(spec.precision.dtype)
    head = spec.algorithm.head
    model = build_model(
        model_config, layout, dtype=dtype, recompute=spec.training.recompute, head=head
    )
    load_weights(model, model_config, RandomTensors(model_config, 1, head))
    return Trainer(
        model,
        model_config,
        layout,
        loss=load_algorithm(spec.algorithm),
        optimizer_spec=spec.optimizer,
        dtype=dtype,
        micro_batch_tokens=spec.training.micro_batch_tokens,
        packing=spec.training.packing,
    )


def _optimizer_bytes(trainer: "Trainer") -> int:
    """Moments of all parameters, and their fp32 copies where they are of another format."""
    parts = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    total = 0
    for part in parts:
        for parameter, state in part.optimizer.state.items():
            total += sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
            if trainer.chunks[0].config.params_dtype != torch.float32:
                total += parameter.nbytes
    return total


def weigh_sampling(
    _rank: int, layout: Layout, config: dict[str, Any], spec: JobSpec
) -> tuple[int, int, int]:
    """Bytes of a sampling copy, of its matrices once more, and of the keys and values of sequences
    that are as long as they can be."""
    from algorithms.protocols import Sampling
    from megatron_backend.generation import cpu_engine, decoder_weights
    from megatron_backend.generation.kv_cache import KeyValueCache
    from megatron_backend.generation.matrices import Matrix
    from megatron_backend.models.build import build_model
    from megatron_backend.models.tensors import RandomTensors
    from megatron_backend.models.weights import load_weights
    from service.spec.model_config import ModelConfig

    packed, caches = [], []

    class Noted(Matrix):
        def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
            super().__init__(weight, bias)
            packed.append(weight.nbytes)

    class Kept(KeyValueCache):
        def __init__(self, **sizes: Any) -> None:
            super().__init__(**sizes)
            caches.append(sum(layer.nbytes for layer in self.layers))

    model_config = ModelConfig.from_hf(config)
    [model] = build_model(model_config, layout)
    load_weights([model], model_config, RandomTensors(model_config, 1))
    length, new = spec.training.max_length, 4
    rows = spec.training.global_batch_size
    prompts = full_batch(rows, length - new, config["vocab_size"]).tokens.tolist()
    engine = cpu_engine.CpuEngine(model, model_config, stop_token_ids=[], max_length=length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_weights, "Matrix", Noted)
        patch.setattr(cpu_engine, "KeyValueCache", Kept)
        engine.generate(
            prompts,
            range(rows),
            Sampling(temperature=1.0, max_new_tokens=new, seed=1),
            weight_version=1,
        )
    return sum(p.nbytes for p in model.parameters()), sum(packed), max(caches)


def engine_limits(_rank: int) -> tuple[int, float]:
    """Bytes of the CPU engine's cache; the share of free GPU memory that the other engine takes."""
    from megatron_backend.generation.cpu_engine import CpuEngine
    from megatron_backend.generation.rank import _CACHE_SHARE

    default: int = inspect.signature(CpuEngine).parameters["memory_bytes"].default
    return default, _CACHE_SHARE
