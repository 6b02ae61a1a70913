"""What the ranks do in tests of weight sync: build, sync, compare with what was never synced."""

from pathlib import Path
from typing import Any

import torch

from megatron_backend.models.tensors import SafetensorsFolder
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.small_models import read_config

DTYPE = torch.bfloat16


def trained_chunks(folder: Path, layout: Layout) -> list[Any]:
    """This rank's chunks of a saved model, in the training layout."""
    from megatron_backend.models.build import build_model
    from megatron_backend.models.weights import load_weights

    config = ModelConfig.from_hf(read_config(folder))
    chunks = build_model(config, layout, dtype=DTYPE)
    load_weights(chunks, config, SafetensorsFolder(folder))
    return chunks


def generation_copy(folder: Path, layout: Layout, padded_vocab: int, *, load: bool) -> Any:
    """This rank's part of a generation copy, with weights read from files or with none."""
    from megatron_backend.models.build import build_model
    from megatron_backend.models.weights import load_weights
    from megatron_backend.weight_sync.groups import generation_groups

    config = ModelConfig.from_hf(read_config(folder))
    [model] = build_model(
        config,
        layout,
        dtype=DTYPE,
        pg_collection=generation_groups(layout),
        padded_vocab=padded_vocab,
    )
    if load:
        load_weights([model], config, SafetensorsFolder(folder))
    else:
        poison(model)
    return model


def poison(model: Any) -> None:
    """No weight of the model is a number any more."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)


def differences(model: Any, expected: Any) -> list[str]:
    """Names of the parameters that are not equal to the bit."""
    pairs = zip(model.named_parameters(), expected.named_parameters(), strict=True)
    return [
        name for (name, one), (other, two) in pairs if name != other or not torch.equal(one, two)
    ]


def sync_twice(
    _rank: int, folder: Path, train_layout: Layout, layout: Layout, shared_memory: bool
) -> tuple[list[str], int, int]:
    """What is wrong after the second sync, how many plans were made, and messages of this rank."""
    from megatron_backend.weight_sync import reshard

    source = trained_chunks(folder, train_layout)
    vocabulary = source[0].vocab_size
    target = generation_copy(folder, layout, vocabulary, load=False)
    sync = reshard.WeightSync(source, target, shared_memory=shared_memory)
    sync.run()
    poison(target)
    sync.run()
    assert sync._plan is not None
    messages = len(sync._plan.sends) + len(sync._plan.receives)
    expected = generation_copy(folder, layout, vocabulary, load=True)
    return differences(target, expected), sync.plans_made, messages


def sync_of_megatron(_rank: int, folder: Path, train_layout: Layout, layout: Layout) -> list[str]:
    """Where Megatron's own resharding gives other weights than ours."""
    from megatron.core.resharding.refit import clear_all_caches, swap_model_weights

    from megatron_backend.weight_sync.reshard import WeightSync

    source = trained_chunks(folder, train_layout)
    ours, theirs = (
        generation_copy(folder, layout, source[0].vocab_size, load=False) for _ in range(2)
    )
    WeightSync(source, ours).run()
    swap_model_weights(source, [theirs], "gloo")
    clear_all_caches()
    return differences(ours, theirs)


def train_side(rank: int, folder: Path, layout: Layout, port: int, size: int) -> int:
    """A trainer's rank that sends its weights twice to ranks of another world."""
    from megatron_backend.weight_sync.peers import join_peers
    from megatron_backend.weight_sync.reshard import WeightSync

    source = trained_chunks(folder, layout)
    group = join_peers(address="127.0.0.1", port=port, rank=rank, size=size)
    for shared_memory in (True, False):
        sync = WeightSync(source, None, group=group, shared_memory=shared_memory)
        sync.run()
        sync.run()
    return len(sync._plan.sends) if sync._plan else -1


def generate_side(
    rank: int, folder: Path, layout: Layout, port: int, size: int, padded_vocab: int
) -> list[list[str]]:
    """A generator's rank, the last of the common group: what is wrong after each way of sync."""
    from megatron_backend.weight_sync.peers import join_peers
    from megatron_backend.weight_sync.reshard import WeightSync

    target = generation_copy(folder, layout, padded_vocab, load=False)
    expected = generation_copy(folder, layout, padded_vocab, load=True)
    first = size - layout.world_size
    group = join_peers(address="127.0.0.1", port=port, rank=first + rank, size=size)
    wrong = []
    for shared_memory in (True, False):
        sync = WeightSync(None, target, group=group, shared_memory=shared_memory)
        sync.run()
        poison(target)
        sync.run()
        wrong.append(differences(target, expected))
    return wrong
