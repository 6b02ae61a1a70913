"""How parameters are cut over ranks, and put together again."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_backend.models.cuts import Columns, GateAndUp, Part, Qkv, VocabularyRows
from megatron_backend.models.mapping import cut_of, tensor_shapes
from megatron_backend.models.tensors import SINGLE_FILE, RandomTensors
from megatron_backend.models.vocabulary import real_columns
from service.spec.model_config import ModelConfig
from service.spec.padding import padded_vocab_size
from tests.megatron_backend.small_models import CONFIGS, save_random


class Tensors:
    """A source of tensors that are given."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        index = [slice(None)] * self._tensors[name].dim()
        index[dim] = slice(start, stop)
        return self._tensors[name][tuple(index)]


def config(**changes: int) -> ModelConfig:
    return ModelConfig.from_hf(CONFIGS["llama"] | changes)


@pytest.mark.parametrize(
    ("tp", "parts"),
    [
        (1, [["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"]]),
        (2, [["q0", "q1", "k0", "v0"], ["q2", "q3", "k1", "v1"]]),
        (4, [["q0", "q1"], ["k0", "v0"], ["q2", "q3"], ["k1", "v1"]]),
    ],
)
def test_d10_qkv_rows_are_interleaved_by_kv_head(tp: int, parts: list[list[str]]) -> None:
    # head_dim 1 cannot be built (rotary embeddings), so a head is two equal rows here.
    number = {"q0": 0, "q1": 1, "q2": 2, "q3": 3, "k0": 10, "k1": 11, "v0": 20, "v1": 21}

    def rows(names: list[str]) -> Tensor:
        return torch.tensor([[float(number[name])] for name in names for _ in range(2)])

    source = Tensors(
        {
            "q": rows(["q0", "q1", "q2", "q3"]),
            "k": rows(["k0", "k1"]),
            "v": rows(["v0", "v1"]),
        }
    )
    cut, model = Qkv(("q", "k", "v")), config(head_dim=2)
    loaded = [
        cut.load(source, model, Part(rank=rank, size=tp, padded_vocab=0)) for rank in range(tp)
    ]
    for part, names in zip(loaded, parts, strict=True):
        assert torch.equal(part, rows(names))
    united = cut.unite(loaded, model)
    for name in "qkv":
        assert torch.equal(united[name], source.read(name))


def test_d08_padded_rows_are_zeros_and_are_dropped_again() -> None:
    model = config(vocab_size=7)
    whole = torch.arange(14.0).reshape(7, 2)
    cut = VocabularyRows(("e",))
    parts = [
        cut.load(Tensors({"e": whole}), model, Part(rank=rank, size=2, padded_vocab=16))
        for rank in range(2)
    ]
    assert [part.shape for part in parts] == [(8, 2), (8, 2)]
    assert torch.equal(parts[0][:7], whole)
    assert not parts[0][7:].any()
    assert not parts[1].any()
    assert torch.equal(cut.unite(parts, model)["e"], whole)


def test_gate_and_up_are_cut_apart() -> None:
    model = config(intermediate_size=4)
    source = Tensors({"g": torch.arange(4.0).reshape(4, 1), "u": 10 + torch.arange(4.0)[:, None]})
    cut = GateAndUp(("g", "u"), "ffn")
    parts = [cut.load(source, model, Part(rank=r, size=2, padded_vocab=0)) for r in range(2)]
    assert parts[1].flatten().tolist() == [2, 3, 12, 13]
    assert torch.equal(cut.unite(parts, model)["u"], source.read("u"))


def test_columns() -> None:
    model = config(intermediate_size=4)
    source = Tensors({"d": torch.arange(8.0).reshape(2, 4)})
    cut = Columns(("d",), "ffn")
    parts = [cut.load(source, model, Part(rank=r, size=2, padded_vocab=0)) for r in range(2)]
    assert parts[1].tolist() == [[2, 3], [6, 7]]
    assert torch.equal(cut.unite(parts, model)["d"], source.read("d"))


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(KeyError, match=r"decoder.layers.0.mlp.router.weight"):
        cut_of(config(), "decoder.layers.0.mlp.router.weight")


def test_e06_vocabulary_sizes() -> None:
    assert padded_vocab_size(50257, tp=2, divisor=128) == 50432
    assert padded_vocab_size(50257, tp=8) == 51200
    assert padded_vocab_size(3, tp=2, divisor=1) == 4
    assert [real_columns(3, width=2, tp_rank=rank) for rank in range(2)] == [2, 1]
    assert [real_columns(7, width=8, tp_rank=rank) for rank in range(2)] == [7, 0]


def test_d19_both_kinds_of_expert_names_lead_to_the_same_tensors() -> None:
    """Computed one after another, or in one product; ranks count their own experts from 0."""
    qwen, mixtral = (ModelConfig.from_hf(CONFIGS[name]) for name in ("qwen3_moe", "mixtral"))
    for name in ("local_experts.1.linear_fc1.weight", "linear_fc1.weight1"):
        key = f"decoder.layers.0.mlp.experts.{name}"
        cut = cut_of(qwen, key, first_layer=1, first_expert=2)
        expert = "model.layers.1.mlp.experts.3."
        assert cut.names == (expert + "gate_proj.weight", expert + "up_proj.weight")
        cut = cut_of(mixtral, key, first_layer=1, first_expert=2)
        expert = "model.layers.1.block_sparse_moe.experts.3."
        assert cut.names == (expert + "w1.weight", expert + "w3.weight")
    router = cut_of(mixtral, "decoder.layers.2.mlp.router.weight", first_expert=2)
    assert router.names == ("model.layers.2.block_sparse_moe.gate.weight",)


@pytest.mark.parametrize("name", CONFIGS)
def test_random_weights_are_reproducible_and_shaped_as_transformers_saves_them(
    name: str, tmp_path: Path
) -> None:
    model = ModelConfig.from_hf(CONFIGS[name])
    save_random(name, tmp_path)
    saved = load_file(tmp_path / SINGLE_FILE)
    assert tensor_shapes(model) == {key: tuple(tensor.shape) for key, tensor in saved.items()}
    one, same, other = (RandomTensors(model, seed) for seed in (1, 1, 2))
    weight = next(key for key in tensor_shapes(model) if "layers.1" in key and "gate" in key)
    assert torch.equal(one.read(weight, 0, 1, 3), same.read(weight)[1:3])
    assert not torch.equal(one.read(weight), other.read(weight))
    assert one.read(weight).std().item() == pytest.approx(model.initializer_range, rel=0.25)
    assert not torch.equal(one.read(weight), one.read(weight.replace("layers.1", "layers.2")))
    norm = torch.zeros if model.zero_centered_norm else torch.ones
    assert torch.equal(one.read("model.norm.weight"), norm(model.hidden_size))
