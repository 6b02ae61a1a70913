"""Weights in and out: byte-equal in every layout, and what is missing is named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_backend.models.config import ModelConfig
from megatron_backend.models.tensors import (
    INDEX_FILE,
    SINGLE_FILE,
    RandomTensors,
    SafetensorsFolder,
    tensor_shapes,
)
from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import CONFIGS, read_config, save_random
from tests.megatron_backend.training.training_runs import LEARNING_RATE, random_batch

LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2), Layout(dp=2)]


def copy_through(
    _rank: int, source: Path, target: Path, layout: Layout, dtype: torch.dtype, max_bytes: int
) -> list[int]:
    """Imports `source`, exports to `target`; the numbers of this rank's layers."""
    from megatron_backend.models.build import build_model
    from megatron_backend.models.export import export_hf
    from megatron_backend.models.weights import load_weights

    config = ModelConfig.from_hf(read_config(source))
    model = build_model(config, layout, dtype=dtype)
    load_weights(model, config, SafetensorsFolder(source))
    export_hf(model, config, layout, target, max_file_bytes=max_bytes)
    return [layer.layer_number - 1 for chunk in model for layer in chunk.decoder.layers]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_import_and_export_give_the_same_bytes_d08(
    ranks: Ranks, tmp_path: Path, name: str, layout: Layout
) -> None:
    """101 tokens are padded to 104 or 112 inside; 3 layers are 2 and 1 in two stages (E01)."""
    source, target = tmp_path / "source", tmp_path / "target"
    save_random(name, source)
    layers = ranks.run(layout, copy_through, source, target, layout, torch.float32, 10**9)
    stages = [layers[layout.rank(pp=stage)] for stage in range(layout.pp)]
    assert [layer for stage in stages for layer in stage] == [0, 1, 2]
    assert (target / SINGLE_FILE).read_bytes() == (source / SINGLE_FILE).read_bytes()
    assert read_config(target)["vocab_size"] == 101
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
def test_many_files_with_an_index(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    source, target, again = (tmp_path / name for name in ("source", "target", "again"))
    save_random("qwen2", source)
    ranks.run(layout, copy_through, source, target, layout, torch.float32, 30_000)
    index = json.loads((target / INDEX_FILE).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert sorted(path.name for path in target.glob("*.safetensors")) == files
    whole = load_file(source / SINGLE_FILE)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    ranks.run(layout, copy_through, target, again, layout, torch.float32, 10**9)
    assert (again / SINGLE_FILE).read_bytes() == (source / SINGLE_FILE).read_bytes()


def test_transformers_loads_what_is_exported(ranks: Ranks, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    expected = save_random("qwen3-tied", source)
    ranks.run(Layout(tp=2), copy_through, source, target, Layout(tp=2), torch.bfloat16, 10**9)
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert model.dtype == torch.bfloat16
    weights, exact = model.state_dict(), expected.bfloat16().state_dict()
    assert weights.keys() == exact.keys()
    assert all(torch.equal(weights[name], exact[name]) for name in exact)
    assert model.generation_config.eos_token_id == 2


def test_missing_and_misshapen_weights_are_named(ranks: Ranks, tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE)
    missing = "model.layers.1.self_attn.k_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != missing}, tmp_path / SINGLE_FILE)
    arguments = (tmp_path, tmp_path / "out", Layout(), torch.float32, 10**9)
    with pytest.raises(RuntimeError, match=missing):
        ranks.run(Layout(), copy_through, *arguments)
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(RuntimeError, match=r"final_layernorm.weight: shape \[5\]"):
        ranks.run(Layout(), copy_through, *arguments)
    (tmp_path / SINGLE_FILE).unlink()
    with pytest.raises(FileNotFoundError, match="has neither"):
        SafetensorsFolder(tmp_path)


def export_new(_rank: int, target: Path, layout: Layout, seed: int) -> None:
    """Exports a new random model."""
    from megatron_backend.models.build import build_model
    from megatron_backend.models.export import export_hf
    from megatron_backend.models.weights import load_weights

    config = ModelConfig.from_hf(CONFIGS["qwen2"])
    model = build_model(config, layout)
    load_weights(model, config, RandomTensors(config, seed))
    export_hf(model, config, layout, target)


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_new_weights_depend_on_the_seed_and_not_on_the_layout(
    ranks: Ranks, tmp_path: Path, layout: Layout
) -> None:
    ranks.run(layout, export_new, tmp_path / "split", layout, 7)
    config = ModelConfig.from_hf(CONFIGS["qwen2"])
    source = RandomTensors(config, 7)
    exported = load_file(tmp_path / "split" / SINGLE_FILE)
    assert exported.keys() == tensor_shapes(config).keys()
    assert all(torch.equal(tensor, source.read(name)) for name, tensor in exported.items())


def train_tied(_rank: int, layout: Layout, steps: int) -> list[Any]:
    """Both copies of a tied embedding after each step, from the two stages."""
    from algorithms.batch import Normalizer
    from service.spec import SftSpec
    from tests.megatron_backend.training.training_runs import build_trainer

    trainer = build_trainer("qwen2-tied", layout, SftSpec())
    copies = []
    for seed in range(steps):
        batch = random_batch(seed=seed)
        trainer.train_step(batch, Normalizer.of(batch), learning_rate=LEARNING_RATE)
        chunk = trainer.chunks[0].module
        copies.append(chunk.shared_embedding_or_output_weight().detach().clone())
    return copies


def test_tied_copies_on_two_stages_stay_equal_e08(ranks: Ranks) -> None:
    first, last = ranks.run(Layout(pp=2), train_tied, Layout(pp=2), 10)
    assert all(torch.equal(one, other) for one, other in zip(first, last, strict=True))
    assert not torch.equal(first[0], first[-1])


def test_an_index_may_point_into_several_files(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0).reshape(3, 2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "2.safetensors")
    (tmp_path / INDEX_FILE).write_text(
        json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    )
    folder = SafetensorsFolder(tmp_path)
    assert folder.read("a", 0, 1, 3).tolist() == [[2, 3], [4, 5]]
    assert folder.read("a", 1, 1).flatten().tolist() == [1, 3, 5]
    assert "b" in folder
    with pytest.raises(KeyError, match="no tensor 'c'"):
        folder.read("c")
    shutil.rmtree(tmp_path)
