"""The comparison behind `max_logit_diff` sees a tensor that is wrong."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_backend.checkpoint.fence import Fence, StaleAttempt
from megatron_backend.driver.export import TOLERANCE, largest_difference, sweep
from tests.megatron_backend.small_models import save_random


def test_the_same_weights_and_a_wrong_tensor(tmp_path: Path) -> None:
    model = save_random("qwen2", tmp_path)
    tokens = torch.randint(101, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens).logits
    assert largest_difference(tmp_path, tokens, logits) == 0
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name].flip(0).contiguous()  # heads in the wrong order
    save_file(tensors, file, metadata={"format": "pt"})
    assert largest_difference(tmp_path, tokens, logits) > 10 * TOLERANCE["fp32"]


def test_a_single_logit_counts(tmp_path: Path) -> None:
    model = save_random("llama", tmp_path)
    tokens = torch.randint(101, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens).logits
    logits[1, 4, 77] += 0.5
    assert largest_difference(tmp_path, tokens, logits) == pytest.approx(0.5, abs=1e-4)


def test_only_the_newest_attempt_sweeps(tmp_path: Path) -> None:
    root = tmp_path / "exports"
    (root / ".tmp-step-00000004-2-ab").mkdir(parents=True)
    (root / "step-00000002").mkdir()
    Fence(tmp_path, 2).take()
    with pytest.raises(StaleAttempt, match="attempt 2 of this job has taken over"):
        sweep(root, Fence(tmp_path, 1))
    assert len(list(root.iterdir())) == 2
    sweep(root, Fence(tmp_path, 2))
    assert [path.name for path in root.iterdir()] == ["step-00000002"]
