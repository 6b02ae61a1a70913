"""How parameters are cut over ranks, and put together again."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from megatron_backend.models.config import ModelConfig
from megatron_backend.models.mapping import Columns, GateAndUp, Part, Qkv, VocabularyRows, cut_of
from megatron_backend.models.tensors import RandomTensors, tensor_shapes
from megatron_backend.models.vocabulary import padded_vocab_size, real_columns
from tests.megatron_backend.small_models import CONFIGS


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
def test_qkv_rows_are_interleaved_by_kv_head_d10(tp: int, parts: list[list[str]]) -> None:
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
    cut, model = Qkv("q", "k", "v"), config(head_dim=2)
    loaded = [
        cut.load(source, model, Part(rank=rank, size=tp, padded_vocab=0)) for rank in range(tp)
    ]
    for part, names in zip(loaded, parts, strict=True):
        assert torch.equal(part, rows(names))
    united = cut.unite(loaded, model)
    for name in "qkv":
        assert torch.equal(united[name], source.read(name))


def test_padded_rows_are_zeros_and_are_dropped_again_d08() -> None:
    model = config(vocab_size=7)
    whole = torch.arange(14.0).reshape(7, 2)
    cut = VocabularyRows("e")
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
    cut = GateAndUp("g", "u")
    parts = [cut.load(source, model, Part(rank=r, size=2, padded_vocab=0)) for r in range(2)]
    assert parts[1].flatten().tolist() == [2, 3, 12, 13]
    assert torch.equal(cut.unite(parts, model)["u"], source.read("u"))


def test_columns() -> None:
    model = config(intermediate_size=4)
    source = Tensors({"d": torch.arange(8.0).reshape(2, 4)})
    cut = Columns("d", "ffn")
    parts = [cut.load(source, model, Part(rank=r, size=2, padded_vocab=0)) for r in range(2)]
    assert parts[1].tolist() == [[2, 3], [6, 7]]
    assert torch.equal(cut.unite(parts, model)["d"], source.read("d"))


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(KeyError, match=r"decoder.layers.0.mlp.router.weight"):
        cut_of(config(), "decoder.layers.0.mlp.router.weight")


def test_vocabulary_sizes_e06() -> None:
    assert padded_vocab_size(50257, tp=2, divisor=128) == 50432
    assert padded_vocab_size(50257, tp=8) == 51200
    assert padded_vocab_size(3, tp=2, divisor=1) == 4
    assert [real_columns(3, width=2, tp_rank=rank) for rank in range(2)] == [2, 1]
    assert [real_columns(7, width=8, tp_rank=rank) for rank in range(2)] == [7, 0]


@pytest.mark.parametrize("name", CONFIGS)
def test_random_weights_are_reproducible_and_shaped_as_transformers_saves_them(name: str) -> None:
    import transformers

    model = ModelConfig.from_hf(CONFIGS[name])
    hf = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**CONFIGS[name])
    )
    expected = {key: tuple(tensor.shape) for key, tensor in hf.state_dict().items()}
    if model.tied:
        del expected["lm_head.weight"]
    assert tensor_shapes(model) == expected
    one, same, other = (RandomTensors(model, seed) for seed in (1, 1, 2))
    weight = "model.layers.1.mlp.gate_proj.weight"
    assert torch.equal(one.read(weight, 0, 8, 24), same.read(weight)[8:24])
    assert not torch.equal(one.read(weight), other.read(weight))
    assert one.read(weight).std().item() == pytest.approx(model.initializer_range, rel=0.1)
    assert not torch.equal(one.read(weight), one.read(weight.replace("1.mlp", "2.mlp")))
    assert torch.equal(one.read("model.norm.weight"), torch.ones(model.hidden_size))
