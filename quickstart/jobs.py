"""The quickstart's two jobs, as the documents that go over REST."""

from pathlib import Path
from typing import Any

from data import ENVIRONMENT, GRPO_SEED, HELD_OUT_SEED

SFT_STEPS, SFT_ROWS = 300, 64
GRPO_STEPS, QUESTIONS, SAMPLES = 32, 32, 8
TOOL_SHARE = 0.45
MAX_NEW_TOKENS = 20


def sft(*, seed: int, config: dict[str, Any], tokenizer: Path, file_id: str, items: int) -> Any:
    """Supervised fine-tuning of a new model on two data-parallel ranks."""
    return {
        "name": f"calculator-sft-{seed}",
        "model": {"init": {"config": config, "tokenizer": str(tokenizer)}},
        "algorithm": {"type": "sft"},
        "data": {"train": file_id, "shuffle_seed": seed},
        "parallel": {"dp": 2},
        "optimizer": {
            "learning_rate": 3e-3,
            "schedule": "cosine",
            "warmup_steps": 20,
            "weight_decay": 0.01,
            "betas": [0.9, 0.999],
        },
        "training": {
            "steps": SFT_STEPS,
            "global_batch_size": SFT_ROWS,
            "max_length": 128,
            "seed": seed,
        },
        "checkpoint": {"every_steps": 100, "export": False},
        "rollout": {"max_new_tokens": MAX_NEW_TOKENS},
        "evaluation": evaluation(seed, items),
    }


def grpo(*, seed: int, sft_job: str, items: int) -> Any:
    """GRPO from the other job's checkpoint, under another layout: two tensor-parallel ranks."""
    return {
        "name": f"calculator-grpo-{seed}",
        "model": {"from": f"job:{sft_job}@latest"},
        "algorithm": {"type": "grpo", "group_size": SAMPLES},
        "environment": {**ENVIRONMENT, "seed": GRPO_SEED + seed},
        "rollout": {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 1.0},
        "parallel": {"tp": 2},
        "optimizer": {"learning_rate": 2e-4},
        "training": {
            "steps": GRPO_STEPS,
            "global_batch_size": QUESTIONS * SAMPLES,
            "max_length": 128,
            "seed": seed,
        },
        "checkpoint": {"every_steps": 10},
        "evaluation": evaluation(seed, items),
    }


def evaluation(seed: int, items: int) -> dict[str, Any]:
    """The same held-out questions for both jobs."""
    return {"environment": ENVIRONMENT, "items": items, "seed": HELD_OUT_SEED + seed}
