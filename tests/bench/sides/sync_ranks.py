"""What our ranks do in a weight sync: two tensor-parallel ones send, a third one takes."""

import time
from typing import Any

import torch

from service.spec.layout import Layout
from tests.bench.sides.fixed_llama import hf_config

SYNCS = 4


def _model(layout: Layout, sizes: dict[str, int], seed: int | None) -> list[Any]:
    from megatron_backend.models.build import build_model
    from megatron_backend.models.tensors import RandomTensors
    from megatron_backend.models.weights import load_weights
    from service.spec.model_config import ModelConfig
    from service.spec.padding import padded_vocab_size

    config = ModelConfig.from_hf(hf_config(sizes))
    padded = padded_vocab_size(config.vocab_size, tp=2)
    model = build_model(config, layout, max_length=16, padded_vocab=padded)
    if seed is not None:
        load_weights(model, config, RandomTensors(config, seed))
    return model


def send(rank: int, layout: Layout, sizes: dict[str, int], port: int) -> list[float]:
    """The trainer's ranks."""
    from megatron_backend.weight_sync.peers import join_peers
    from megatron_backend.weight_sync.reshard import WeightSync

    source = _model(layout, sizes, seed=1)
    group = join_peers(address="127.0.0.1", port=port, rank=rank, size=3)
    sync = WeightSync(source, None, group=group)
    return [_timed(sync) for _ in range(SYNCS)]


def take(_rank: int, sizes: dict[str, int], port: int) -> dict[str, Any]:
    """The generator: seconds of each sync, the bytes of it, and whether every weight is right."""
    from megatron_backend.weight_sync.peers import join_peers
    from megatron_backend.weight_sync.reshard import WeightSync

    [target] = _model(Layout(), sizes, seed=None)
    group = join_peers(address="127.0.0.1", port=port, rank=2, size=3)
    sync = WeightSync(None, target, group=group)
    seconds = [_timed(sync) for _ in range(SYNCS)]
    [expected] = _model(Layout(), sizes, seed=1)
    pairs = zip(target.parameters(), expected.parameters(), strict=True)
    return {
        "seconds": seconds,
        "bytes": sum(parameter.nbytes for parameter in target.parameters()),
        "right": all(torch.equal(one, other) for one, other in pairs),
    }


def _timed(sync: Any) -> float:
    start = time.perf_counter()
    sync.run()
    return time.perf_counter() - start
