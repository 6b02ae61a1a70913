"""Which layers are built where, and layouts that Megatron would train wrongly."""

from typing import Any

import pytest

from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import CONFIGS


def built_layers(_rank: int, name: str, layout: Layout, sizes: dict[str, Any]) -> list[list[int]]:
    """Numbers, in the whole model, of each chunk's layers."""
    from megatron_backend.models.build import build_model

    chunks = build_model(ModelConfig.from_hf(CONFIGS[name] | sizes), layout)
    return [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in chunks]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (Layout(pp=4), 30),
        (Layout(pp=4, pipeline_layers=(1, 3, 2, 1)), 7),
        (Layout(pp=4, vpp=2), 8),
    ],
    ids=str,
)
def test_every_layer_is_built_once_and_where_the_layout_says_e01(
    ranks: Ranks, layout: Layout, layers: int
) -> None:
    built = ranks.run(layout, built_layers, "llama", layout, {"num_hidden_layers": layers})
    assert built == [[list(chunk) for chunk in stage] for stage in layout.stage_layers(layers)]
    assert sorted(layer for stage in built for chunk in stage for layer in chunk) == [
        *range(layers)
    ]


def refuse(_rank: int, name: str, layout: Layout, reason: str) -> None:
    """Fails unless the model cannot be trained in this layout."""
    from megatron_backend.models.build import build_model

    with pytest.raises(ValueError, match=reason):
        build_model(ModelConfig.from_hf(CONFIGS[name]), layout)


@pytest.mark.parametrize(
    ("name", "layout", "reason"),
    [
        ("qwen3_moe", Layout(tp=2), "tp = 2 with experts needs sequence_parallel"),
        ("qwen3", Layout(dp=2, ep=2), "ep = 2, but the model has no experts"),
        ("qwen3", Layout(pp=2, vpp=2), "vpp = 2 chunks on each of pp = 2 stages do not divide 3"),
        ("qwen3", Layout(pp=2, pipeline_layers=(1, 1)), "are 2 layers, but the model has 3"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    ranks: Ranks, name: str, layout: Layout, reason: str
) -> None:
    ranks.run(layout, refuse, name, layout, reason)
