"""The quickstart's training rows: most answer at once, the rest call the calculator first."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from environments.registry import get

QUESTIONS = {
    "id": "reasoning_gym/chain_sum",
    "config": {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 2},
}
ENVIRONMENT = {"id": "tools/calculator", "max_turns": 2, "config": {"questions": QUESTIONS}}

# Seeds that no two uses share, whatever --seed is (it is at most 999).
SFT_SEED, GRPO_SEED, HELD_OUT_SEED = 1_000_000, 2_000_000, 3_000_000


def questions(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Items of chain_sum: `question`, `answer`, `metadata.expression`."""
    kind = get(QUESTIONS["id"])
    config = kind.config_model.model_validate(QUESTIONS["config"])
    return iter(kind.items(config, seed=seed, count=count))


def write_rows(path: Path, *, seed: int, count: int, tool_share: float, held_out: int) -> None:
    """Writes `count` rows of OpenAI messages; no held-out question is among them."""
    # The held-out questions are the first that differ: more are kept back than will be asked.
    kept_back = {item["question"] for item in questions(HELD_OUT_SEED + seed, 2 * held_out)}
    chooser = random.Random(seed)
    fresh = (
        item
        for item in questions(SFT_SEED + seed, count + count // 10)
        if item["question"] not in kept_back
    )
    with path.open("w") as file:
        for item, _ in zip(fresh, range(count), strict=False):
            calls = chooser.random() < tool_share
            file.write(json.dumps({"messages": conversation(item, calls=calls)}) + "\n")


def conversation(item: dict[str, Any], *, calls: bool) -> list[dict[str, Any]]:
    """One row's messages: the question, maybe a tool call and its result, the answer."""
    answer = {"role": "assistant", "content": item["answer"]}
    question = {"role": "user", "content": item["question"]}
    if not calls:
        return [question, answer]
    arguments = json.dumps({"expression": item["metadata"]["expression"]})
    function = {"name": "calculator", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    return [
        question,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": item["answer"]},
        answer,
    ]
