"""A Megatron model built and loaded by us gives the logits that transformers gives."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_backend.models.config import ModelConfig
from megatron_backend.models.tensors import SafetensorsFolder
from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import CONFIGS, save_random


def megatron_logits(_rank: int, folder: Path, layout: Layout, tokens: Tensor) -> Tensor:
    """[B, T, V] of the last stage, padding removed."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from megatron_backend.models.build import build_model
    from megatron_backend.models.weights import load_weights
    from tests.megatron_backend.small_models import read_config

    config = ModelConfig.from_hf(read_config(folder))
    [model] = build_model(config, layout)
    load_weights([model], config, SafetensorsFolder(folder))
    model.eval()
    with torch.no_grad():
        output = model(input_ids=tokens, position_ids=None, attention_mask=None)
        return gather_from_tensor_model_parallel_region(output)[..., : config.vocab_size]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_logits_equal_those_of_transformers(
    ranks: Ranks, tmp_path: Path, name: str, layout: Layout
) -> None:
    expected_model = save_random(name, tmp_path)
    tokens = torch.randint(0, CONFIGS[name]["vocab_size"], (3, 17))
    with torch.no_grad():
        expected = expected_model(tokens).logits
    for logits in ranks.run(layout, megatron_logits, tmp_path, layout, tokens):
        assert (logits - expected).abs().max() < 1e-4
