"""Weights in and out: byte-equal in every layout, and what is missing is named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_backend.models.mapping import tensor_shapes
from megatron_backend.models.tensors import (
    INDEX_FILE,
    SINGLE_FILE,
    RandomTensors,
    SafetensorsFolder,
)
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import CONFIGS, read_config, save_random
from tests.megatron_backend.training.training_runs import LEARNING_RATE, random_batch

LAYOUTS = [
    Layout(),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2),
    Layout(tp=2),
    Layout(cp=2),
    Layout(dp=2),
    Layout(dp=2, ep=2),
    Layout(tp=2, pp=2, sequence_parallel=True),
]
DEEP = Layout(pp=2, vpp=2)
WIDE = Layout(tp=2, dp=2, ep=2, sequence_parallel=True)
EXPERTS = [name for name in CONFIGS if "num_experts_per_tok" in CONFIGS[name]]


def copy_through(
    _rank: int, source: Path, target: Path, layout: Layout, dtype: torch.dtype, like: bool
) -> list[int]:
    """Imports `source`, exports to `target`, and imports that; the numbers of this rank's layers.

    With `like` the files are those of the source, else all is one file.
    """
    from megatron_backend.models.build import build_model
    from megatron_backend.models.export import export_hf
    from megatron_backend.models.weights import differing_parameter, load_weights

    config = ModelConfig.from_hf(read_config(source))
    weights = SafetensorsFolder(source)
    model = build_model(config, layout, dtype=dtype)
    load_weights(model, config, weights)
    export_hf(model, config, layout, target, like=weights.file_of if like else None)
    with torch.no_grad():
        for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
            parameter.fill_(torch.nan)
    load_weights(model, config, SafetensorsFolder(target))
    assert differing_parameter(model, config, SafetensorsFolder(target)) is None
    return [layer.layer_number - 1 for chunk in model for layer in chunk.decoder.layers]


def copy_all(rank: int, root: Path, names: list[str], layout: Layout) -> dict[str, list[int]]:
    """`copy_through` for many models under `root`; layers of each."""
    return {
        name: copy_through(
            rank, root / name, root / f"{name}-{layout}", layout, torch.float32, True
        )
        for name in names
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of every family; those named `many-*` are of four layers, in several files."""
    root = tmp_path_factory.mktemp("sources")
    for name, config in CONFIGS.items():
        save_random(name, root / name)
        sizes: dict[str, Any] = {"num_hidden_layers": 4}
        if "layer_types" in config:
            sizes["layer_types"] = [*config["layer_types"], "full_attention"]
        save_random(name, root / f"many-{name}", max_shard_size=30_000, **sizes)
    return root


def check_copy(source: Path, target: Path, *, vocab_size: int = 101) -> None:
    """Every file of weights, and the index, are equal to the byte."""
    names = sorted(path.name for path in source.glob("model*"))
    assert sorted(path.name for path in target.glob("model*")) == names
    for name in names:
        assert (target / name).read_bytes() == (source / name).read_bytes(), name
    assert read_config(target)["vocab_size"] == vocab_size
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == 2


def names_for(layout: Layout) -> list[str]:
    """The models that may be trained so: experts under tensor parallelism need the sequence cut,
    and models without them have nothing to spread."""
    if layout.ep > 1:
        return EXPERTS
    whole = layout.tp > 1 and not layout.sequence_parallel
    return [name for name in CONFIGS if not (whole and name in EXPERTS)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_d08_every_family_comes_out_as_it_went_in(
    ranks: Ranks, sources: Path, layout: Layout
) -> None:
    """101 tokens are padded to 104 or 112 inside; 3 layers are 2 and 1 in two stages (E01)."""
    names = names_for(layout)
    layers = ranks.run(layout, copy_all, sources, names, layout)
    for name in names:
        check_copy(sources / name, sources / f"{name}-{layout}")
        stages = [layers[layout.rank(pp=stage)][name] for stage in range(layout.pp)]
        assert [layer for stage in stages for layer in stage] == [0, 1, 2]


@pytest.mark.parametrize("layout", [DEEP, WIDE], ids=str)
def test_d19_many_files_come_out_with_the_same_tensors_and_index(
    ranks: Ranks, sources: Path, layout: Layout
) -> None:
    """Virtual stages, and experts over ranks; a layer's tensors lie in more than one file."""
    names = [f"many-{name}" for name in names_for(layout)]
    ranks.run(layout, copy_all, sources, names, layout)
    for name in names:
        check_many_files(sources / name, sources / f"{name}-{layout}")


def check_many_files(source: Path, target: Path) -> None:
    """The same files; they are more than a few, and transformers finds the same weights there."""
    check_copy(source, target)
    files = json.loads((source / INDEX_FILE).read_text())["weight_map"]
    assert len(set(files.values())) > 3
    fused = [
        files[f"model.layers.{layer}.self_attn.{x}_proj.weight"] for layer in (0, 1) for x in "qkv"
    ]
    assert len(set(fused)) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    expected = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto").state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_transformers_loads_what_is_exported(ranks: Ranks, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    expected = save_random("qwen3-tied", source)
    ranks.run(Layout(tp=2), copy_through, source, target, Layout(tp=2), torch.bfloat16, False)
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
    arguments = (tmp_path, tmp_path / "out", Layout(), torch.float32, False)
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


@pytest.mark.parametrize("layout", LAYOUTS[1:3], ids=str)
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


def test_e08_tied_copies_on_two_stages_stay_equal(ranks: Ranks) -> None:
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


@pytest.mark.parametrize("file", ["../1.safetensors", "/1.safetensors"])
def test_an_index_may_not_point_out_of_its_folder(tmp_path: Path, file: str) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ValueError, match="names files outside its folder"):
        SafetensorsFolder(tmp_path)


@pytest.mark.slow
def test_d08_50257_tokens_on_eight_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Embedding and head are of 51200 rows inside, and of 50257 in the files."""
    names, layout = ["llama", "qwen2-tied"], Layout(tp=8)
    sizes = {"vocab_size": 50_257, "num_attention_heads": 8, "num_hidden_layers": 1}
    for name in names:
        save_random(name, tmp_path / name, **sizes)
    ranks.run(layout, copy_all, tmp_path, names, layout)
    for name in names:
        check_copy(tmp_path / name, tmp_path / f"{name}-{layout}", vocab_size=50_257)
    written = SafetensorsFolder(tmp_path / f"llama-{layout}")
    for tensor in ("model.embed_tokens.weight", "lm_head.weight"):
        assert written.read(tensor).shape == (50_257, 32)
