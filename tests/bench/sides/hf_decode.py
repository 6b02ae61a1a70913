"""Completions by transformers' `generate` with a cache of keys and values, with their log-probs.

Options: `new` tokens; `cache` is transformers' cache_implementation, null for its usual one.
"""

import time
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.bench import cases
from tests.bench.sides import program


def work(case: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Generates once to warm up, then each way once more, timed."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        case / "model", dtype=torch.float32
    ).eval()
    prompts = torch.tensor(cases.read(case, "prompts"))
    width = prompts.shape[1]

    def generate(sample: bool, count: int) -> tuple[float, list[Any], list[Any]]:
        torch.manual_seed(1)
        start = time.perf_counter()
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=sample,
            **({"top_k": 0, "top_p": 1.0, "temperature": 1.0} if sample else {}),
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation=options["cache"],
            return_dict_in_generate=True,
            output_scores=True,
        )
        log_probs = model.compute_transition_scores(
            out.sequences, out.scores, normalize_logits=True
        )
        tokens = out.sequences[:, width:].tolist()
        return time.perf_counter() - start, tokens, log_probs.tolist()

    generate(False, 8)
    greedy, tokens, log_probs = generate(False, options["new"])
    sampled, draws, draw_log_probs = generate(True, options["new"])
    return {
        "seconds": {"greedy": greedy, "sampled": sampled},
        "tokens": tokens,
        "log_probs": log_probs,
        "draws": draws,
        "draw_log_probs": draw_log_probs,
    }


if __name__ == "__main__":
    program.run(work)
