"""A few steps against the same written plainly: transformers, torch's clipping, torch's AdamW."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from algorithms.batch import Batch
from megatron_backend.models.mapping import tensor_shapes
from megatron_backend.models.tensors import SINGLE_FILE, RandomTensors
from service.spec import SftSpec
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import CONFIGS
from tests.megatron_backend.training.training_runs import LEARNING_RATE, random_batch, train


def plain_model(name: str, folder: Path) -> transformers.PreTrainedModel:
    """transformers' model with the weights that `training_runs.build_trainer` starts from."""
    config = ModelConfig.from_hf(CONFIGS[name])
    source = RandomTensors(config, seed=1)
    tensors = {key: source.read(key) for key in tensor_shapes(config)}
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.train()


def plain_steps(
    model: transformers.PreTrainedModel, batches: list[Batch]
) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of each step."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses, norms = [], []
    for batch in batches:
        adam.zero_grad()
        logits = model(batch.tokens).logits[:, :-1]
        negative = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), batch.tokens[:, 1:], reduction="none"
        )
        mask = batch.loss_mask[:, 1:]
        loss = (negative * mask).sum() / mask.sum()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        adam.step()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen2-tied", "qwen2-yarn", "qwen3"),
        *("mistral", "mixtral", "qwen3_moe", "qwen3_moe-normed", "gemma2", "gemma3_text"),
    ],
)
def test_steps_equal_plain_pytorch(ranks: Ranks, tmp_path: Path, name: str) -> None:
    batches = [random_batch(seed=seed) for seed in range(4)]
    losses, norms = plain_steps(plain_model(name, tmp_path), batches)
    assert max(norms) > 1.0, "the norm must pass the limit, or clipping is not tested"
    (shares,) = ranks.run(Layout(), train, name, Layout(), SftSpec(), batches, {})
    assert [share.loss for share in shares] == pytest.approx(losses, rel=2e-5)
    assert [share.gradient_norm for share in shares] == pytest.approx(norms, rel=1e-4)
