"""An optimizer whose moments and fp32 weights lie in the machine's memory takes the same steps."""

from pathlib import Path

import pytest
import torch

from megatron_backend.checkpoint import contents
from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.training.offload_runs import offload, offload_fp32


@pytest.mark.parametrize(
    ("name", "layout", "dtype"),
    [
        ("qwen2", Layout(), torch.bfloat16),
        ("qwen2", Layout(dp=2), torch.float16),
        ("qwen3_moe", Layout(dp=2, ep=2), torch.bfloat16),
    ],
    ids=str,
)
def test_the_same_steps_and_checkpoints_bit_for_bit(
    ranks: Ranks, tmp_path: Path, name: str, layout: Layout, dtype: torch.dtype
) -> None:
    for saved in ("plain", "offloaded"):
        for part in (contents.STATE, contents.RANDOM):
            (tmp_path / saved / part).mkdir(parents=True)
    for expected, found, again, optimizers in ranks.run(
        layout, offload, name, layout, dtype, tmp_path
    ):
        assert set(optimizers) == {("HybridDeviceOptimizer", 1.0)}
        assert len({loss for loss, _ in expected}) == 3
        assert found == expected
        assert again == [expected[1:]] * 3


def test_megatron_offloads_no_float32(ranks: Ranks) -> None:
    """So a job on GPUs that asks for it is refused (`service.validation.precision`)."""
    [said] = ranks.run(Layout(), offload_fp32)
    assert "non-leaf" in said
