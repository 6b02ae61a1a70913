"""Every family, built and loaded by us, gives the logits that transformers gives."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_backend.models.tensors import SafetensorsFolder
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import CONFIGS, read_config, save_random

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(dp=2, ep=2),
]


def megatron_logits(
    _rank: int, root: Path, names: list[str], layout: Layout, tokens: Tensor
) -> list[Tensor]:
    """[B, T, V] of each model, padding removed."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from megatron_backend.models.build import build_model
    from megatron_backend.models.weights import load_weights

    logits = []
    for name in names:
        config = ModelConfig.from_hf(read_config(root / name))
        [model] = build_model(config, layout)
        load_weights([model], config, SafetensorsFolder(root / name))
        model.eval()
        with torch.no_grad():
            output = model(input_ids=tokens, position_ids=None, attention_mask=None)
            whole = gather_from_tensor_model_parallel_region(output)
        logits.append(whole[..., : config.vocab_size])
    return logits


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, 101, (3, 18), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tokens: Tensor) -> tuple[Path, list[Tensor]]:
    """A folder with a model of every family, and what transformers computes with each."""
    root = tmp_path_factory.mktemp("models")
    with torch.no_grad():
        return root, [save_random(name, root / name)(tokens).logits for name in CONFIGS]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_logits_equal_those_of_transformers(
    ranks: Ranks, tokens: Tensor, expected: tuple[Path, list[Tensor]], layout: Layout
) -> None:
    """Eighteen tokens see further than the windows of five."""
    root, logits = expected
    right = dict(zip(CONFIGS, logits, strict=True))
    names = [name for name in CONFIGS if fits(name, layout)]
    assert names
    for found in ranks.run(layout, megatron_logits, root, names, layout, tokens):
        for name, ours in zip(names, found, strict=True):
            assert (ours - right[name]).abs().max() < 1e-4, name


def fits(name: str, layout: Layout) -> bool:
    """Experts need sequence parallelism beside tensor parallelism; others have none to spread."""
    if "num_experts_per_tok" in CONFIGS[name]:
        return layout.tp == 1 or layout.sequence_parallel
    return layout.ep == 1
