"""Jobs that train a value model: a reward model, or PPO's critic beside its policy."""

import json
from pathlib import Path
from typing import Any

from tests.megatron_backend.driver import tiny_job

LENGTH = 128
QUESTIONS = {
    "id": "reasoning_gym/chain_sum",
    "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}
"""The tiny tokenizer reads most of their signs as [UNK], and no answer is right: what the critic
learns is the KL in the reward."""


def preference(index: int) -> dict[str, Any]:
    """The answer repeats the question's letters; the worse one has none that the model knows."""
    chosen = tiny_job.row(index)["messages"]
    rejected = [chosen[0], {"role": "assistant", "content": "zzzz"}]
    return {"chosen": chosen, "rejected": rejected}


def write_reward_job(folder: Path, **spec: Any) -> Path:
    """A job that trains a reward model on preferences."""
    tiny_job.write_job(folder, **{"algorithm": {"type": "reward_model"}, **spec})
    rows = [json.dumps(preference(index)) for index in range(tiny_job.ROWS)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def write_ppo_job(folder: Path, **spec: Any) -> Path:
    """A job of PPO, with two optimizer steps on each rollout."""
    tiny_job.write_job(
        folder,
        **{
            "algorithm": {"type": "ppo", "mini_batches": 2, "value_model": {"learning_rate": 1e-2}},
            "data": None,
            "environment": QUESTIONS,
            "rollout": {"max_new_tokens": 6},
            "optimizer": {"learning_rate": 1e-2},
            **spec,
        },
    )
    path = folder / "context.json"
    document = json.loads(path.read_text())
    document["model"]["config"]["max_position_embeddings"] = LENGTH
    path.write_text(json.dumps(document))
    return folder
