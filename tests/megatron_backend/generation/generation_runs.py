"""What the ranks do in generation tests: build, sync, generate, and judge by the trainer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from algorithms.batch import Batch, pad_rows
from algorithms.protocols import Completion, Sampling
from megatron_backend.models.tensors import SafetensorsFolder
from megatron_backend.training.shares import RowShare
from service.spec import OptimizerSpec, SftSpec
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.small_models import read_config


def trained_model(folder: Path, layout: Layout, dtype: torch.dtype = torch.float32) -> Any:
    """This rank's part of a saved model, in the training layout."""
    from megatron_backend.models.build import build_model
    from megatron_backend.models.weights import load_weights

    config = ModelConfig.from_hf(read_config(folder))
    [model] = build_model(config, layout, dtype=dtype)
    load_weights([model], config, SafetensorsFolder(folder))
    return model.eval()


def generation_rank(
    folder: Path, layout: Layout, padded_vocab: int, stop: Sequence[int] = (), max_length: int = 64
) -> Any:
    """A generation copy without weights."""
    from megatron_backend.generation.rank import GenerationRank

    return GenerationRank(
        ModelConfig.from_hf(read_config(folder)),
        layout,
        padded_vocab=padded_vocab,
        stop_token_ids=stop,
        max_length=max_length,
    )


def sync_and_generate(
    rank: int,
    folder: Path,
    train_layout: Layout,
    layout: Layout,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    stop: Sequence[int] = (),
    max_length: int = 64,
) -> list[list[Completion]]:
    """This rank's share of the completions, one list for each sampling."""
    model = trained_model(folder, train_layout)
    generator = generation_rank(folder, layout, model.vocab_size, stop, max_length)
    generator.sync([model], 7)
    share = layout.share(len(prompts), layout.coordinates(rank).dp)
    mine = [prompts[index] for index in share]
    return [generator.generate(mine, share, sampling) for sampling in samplings]


def generate_in_bf16(
    _rank: int, folder: Path, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[Completion]:
    """Completions by a model in bf16."""
    from megatron_backend.generation.cpu_engine import CpuEngine

    model = trained_model(folder, Layout(), dtype=torch.bfloat16)
    config = ModelConfig.from_hf(read_config(folder))
    engine = CpuEngine(model, config, stop_token_ids=[], max_length=64)
    return engine.generate(prompts, range(len(prompts)), sampling, weight_version=1)


def merged(layout: Layout, shares: list[list[list[Completion]]]) -> list[list[Completion]]:
    """The whole lists, one for each sampling; tensor-parallel ranks must have answered alike."""
    for rank, share in enumerate(shares):
        assert share == shares[layout.rank(dp=layout.coordinates(rank).dp)]
    spoken = [shares[rank] for rank in layout.output_ranks]
    return [[one for share in lists for one in share] for lists in zip(*spoken, strict=True)]


def trainer_log_probs(
    _rank: int,
    folder: Path,
    layout: Layout,
    sequences: Sequence[Sequence[int]],
    temperature: float,
) -> RowShare | None:
    """The trainer's log-probs of the sequences' own tokens; None on other stages."""
    from algorithms.algorithm import load_algorithm
    from megatron_backend.training.step import Trainer

    trainer = Trainer(
        [trained_model(folder, layout)],
        ModelConfig.from_hf(read_config(folder)),
        layout,
        loss=load_algorithm(SftSpec()),
        optimizer_spec=OptimizerSpec(),
        dtype=torch.float32,
        temperature=temperature,
        micro_batch_size=None,
    )
    own = [[0.0] + [1.0] * (len(row) - 1) for row in sequences]
    return trainer.log_probs(
        Batch(
            tokens=pad_rows([list(row) for row in sequences], value=0, dtype=torch.int64),
            lengths=torch.tensor([len(row) for row in sequences]),
            loss_mask=pad_rows(own, value=0.0, dtype=torch.float32),
        )
    )


def ragged_prompts(*lengths: int, vocab: int = 101, seed: int = 5) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
