"""Operations of an update, against what torch counts in transformers' own models."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from service.spec.flops import peak_flops, update_flops
from service.spec.model_config import ModelConfig

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
ROWS, LENGTH = 2, 24


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_it_is_what_torch_counts_but_for_the_half_that_causal_attention_does_not_see(
    family: str,
) -> None:
    config = COMMON | {"model_type": family}
    if family == "mistral":
        config["sliding_window"] = None
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="eager"
    )
    tokens = torch.randint(96, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    # 4 heads of 8 score a pair and add its value, forward and twice backward, in 3 layers.
    unseen = 3 * 2 * 2 * 4 * 8 * 3 * ROWS * (LENGTH * (LENGTH - 1) // 2)
    found = update_flops(ModelConfig.from_hf(config), [LENGTH] * ROWS, ROWS * LENGTH)
    rotations = _rotary(counter)
    assert found == counter.get_total_flops() - unseen - rotations


def _rotary(counter: FlopCounterMode) -> int:
    """Angles of rotary embeddings, which are tables and not the model's work."""
    return sum(
        sum(by_operator.values())
        for module, by_operator in counter.get_flop_counts().items()
        if module.endswith("rotary_emb")
    )


def test_the_output_layer_counts_for_predicted_tokens() -> None:
    model = ModelConfig.from_hf(COMMON | {"model_type": "llama"})
    assert update_flops(model, [8], 5) - update_flops(model, [8], 0) == 6 * 5 * 96 * 32


def test_a_window_is_all_that_attention_sees() -> None:
    config = COMMON | {"model_type": "mistral", "num_hidden_layers": 1, "sliding_window": 3}
    windowed, whole = (
        ModelConfig.from_hf(config | {"sliding_window": window}) for window in (3, None)
    )
    # Of five tokens the fourth no longer sees one, the fifth no longer two.
    assert update_flops(whole, [5], 0) - update_flops(windowed, [5], 0) == 6 * 2 * 4 * 8 * 3


def test_a_token_goes_to_its_own_experts() -> None:
    config = COMMON | {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
    dense = ModelConfig.from_hf(COMMON | {"model_type": "llama"})
    # A second expert of three matrices, and the router, in three layers.
    more = 6 * 3 * (3 * 32 * 48 + 4 * 32)
    assert update_flops(ModelConfig.from_hf(config), [1], 0) - update_flops(dense, [1], 0) == more


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 9.89e14),
        ("NVIDIA H100 PCIe", 7.56e14),
        ("NVIDIA H100 NVL", 8.35e14),
        ("NVIDIA H200", 9.89e14),
        ("NVIDIA H200 NVL", 8.35e14),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("GRID A100D-40C", None),
        ("NVIDIA A10-24Q", None),
        ("NVIDIA GH200 480GB", 9.89e14),
        ("NVIDIA A100-SXM4-80GB", 3.12e14),
        ("NVIDIA A100 80GB PCIe", 3.12e14),
        ("NVIDIA A10", 1.25e14),
        ("NVIDIA L40S", 3.62e14),
        ("NVIDIA L4", 1.21e14),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_peaks_go_by_the_name_that_cuda_says(gpu: str, peak: float | None) -> None:
    assert peak_flops(gpu) == peak
