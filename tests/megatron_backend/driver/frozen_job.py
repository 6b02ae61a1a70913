"""Jobs with a teacher or a reward model: random models, made and saved by transformers."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from service.spec import JobContext
from tests.megatron_backend.driver import tiny_job

LENGTH = 128
QUESTIONS = {
    "id": "reasoning_gym/chain_sum",
    "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}


def write_job(folder: Path, role: str, model: Path, **spec: Any) -> Path:
    """A job's folder with sums as questions; the tiny model reads most of their signs as [UNK].

    Args:
        folder: of the job.
        role: of the other model.
        model: its folder, as `save_teacher` or `save_reward_model` wrote it.
        spec: the rest of the job's spec.
    """
    tiny_job.write_job(
        folder,
        **{
            "data": None,
            "environment": QUESTIONS,
            "rollout": {"max_new_tokens": 6, "temperature": 1.0},
            "optimizer": {"learning_rate": 1e-2},
            **spec,
        },
    )
    path = folder / "context.json"
    document = json.loads(path.read_text())
    document["model"]["config"]["max_position_embeddings"] = LENGTH
    config = json.loads((model / "config.json").read_text())
    document["other_models"] = {
        role: {
            "kind": "huggingface",
            "config": config,
            "tokenizer": str(model),
            "weights": str(model),
        }
    }
    context = JobContext.model_validate_json(json.dumps(document))
    path.write_text(context.model_dump_json())
    return folder


def _config(folder: Path, **changes: Any) -> transformers.PretrainedConfig:
    """As the tiny job's model, and with its tokenizer in `folder`."""
    return transformers.AutoConfig.for_model(
        "qwen2",
        vocab_size=tiny_job.write_tokenizer(folder),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.3,
        eos_token_id=0,
        pad_token_id=1,
        **changes,
    )


def save_teacher(folder: Path) -> transformers.PreTrainedModel:
    """A model that is much surer of what comes next than the tiny job's own."""
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(_config(folder)).eval()
    model.save_pretrained(folder)
    return model


def save_reward_model(folder: Path) -> transformers.PreTrainedModel:
    """A model with one score for a whole conversation."""
    torch.manual_seed(2)
    config = _config(folder, num_labels=1)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(folder)
    return model
