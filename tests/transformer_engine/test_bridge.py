"""Models of families that have no mapping here, through Megatron-Bridge and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_backend.models.tensors import SINGLE_FILE, SafetensorsFolder
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import CONFIGS, read_config, save_random
from tests.transformer_engine.bridge_runs import copy_through, forget
from tests.transformer_engine.real_modules import cuda_seems_present, on_cuda

_SIZES = {name: CONFIGS["llama"][name] for name in CONFIGS["llama"] if name.endswith("_size")}
_SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES |= {"pad_token_id": 0, "max_position_embeddings": 64}
_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
UNMAPPED: dict[str, dict[str, Any]] = {
    "nemotron": _SIZES,
    "glm4_moe": _SIZES
    | _EXPERTS
    | {"n_routed_experts": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    "gpt_oss": _SIZES | _EXPERTS | {"num_local_experts": 4},
}
"""LayerNorm and a squared ReLU; shared experts behind a dense layer; sinks, biases of experts."""
LAYOUTS = [
    (Layout(), ["nemotron", "glm4_moe", "gpt_oss"]),
    (Layout(tp=2), ["nemotron", "glm4_moe"]),  # experts with biases are not cut, by Megatron
    (Layout(tp=2, sequence_parallel=True), ["nemotron", "glm4_moe"]),
    (Layout(pp=2), ["nemotron", "glm4_moe", "gpt_oss"]),
    (Layout(dp=2, ep=2), ["glm4_moe", "gpt_oss"]),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of each family."""
    root = tmp_path_factory.mktemp("sources")
    torch.manual_seed(1)
    for name, sizes in UNMAPPED.items():
        assert name not in {config["model_type"] for config in CONFIGS.values()}
        config = transformers.AutoConfig.for_model(name, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(root / name)
    return root


@pytest.mark.parametrize(("layout", "names"), LAYOUTS, ids=[str(layout) for layout, _ in LAYOUTS])
def test_families_without_a_mapping_come_out_as_they_went_in(
    ranks: Ranks, sources: Path, layout: Layout, names: list[str]
) -> None:
    """To the byte; the vocabulary of 101 is padded to 102 over two ranks."""
    ranks.run(layout, copy_through, sources, names, layout)
    for name in names:
        source, target = sources / name, sources / f"{name}-{layout}"
        assert (target / SINGLE_FILE).read_bytes() == (source / SINGLE_FILE).read_bytes(), name
        assert read_config(target) == read_config(source)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_a_family_with_a_mapping_becomes_the_same_model(name: str, tmp_path: Path) -> None:
    """Built by Megatron-Bridge's description of it, every parameter is equal to the bit."""
    from megatron_backend.models.bridge import BridgedModel
    from megatron_backend.models.weights import load_weights

    save_random(name, tmp_path / "source", vocab_size=104, dtype="bfloat16")
    config = ModelConfig.from_hf(read_config(tmp_path / "source"))
    ours = on_cuda(config)
    load_weights([ours], config, SafetensorsFolder(tmp_path / "source"))
    with cuda_seems_present():
        model = BridgedModel(tmp_path / "source", Layout(), dtype=torch.bfloat16)
        forget(model.chunks)
        model.load()
    [theirs] = model.chunks
    expected = dict(ours.named_parameters())
    found = dict(theirs.named_parameters())
    assert found.keys() == expected.keys()
    for parameter, value in found.items():
        assert torch.equal(value, expected[parameter]), parameter


@pytest.mark.usefixtures("one_rank")
def test_what_megatron_bridge_does_not_know_either_is_refused(tmp_path: Path) -> None:
    from megatron_backend.models.bridge import BridgedModel, UnknownToBridge

    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(UnknownToBridge, match="Megatron-Bridge cannot convert it"):
        BridgedModel(tmp_path, Layout(), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="vpp = 2"):
        BridgedModel(tmp_path, Layout(pp=2, vpp=2), dtype=torch.bfloat16)
