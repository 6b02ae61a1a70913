"""Completions by our engine on the CPU, greedy and sampled, with their log-probs.

Options: `new` tokens.
"""

import time
from pathlib import Path
from typing import Any

from algorithms.protocols import Completion, Sampling
from tests.bench import cases
from tests.bench.sides import limits, program, single_rank


def work(case: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Generates once to warm up, then each way once more, timed."""
    chunks, config = single_rank.load_model(case)
    from megatron_backend.generation.cpu_engine import CpuEngine

    new = options["new"]
    prompts = cases.read(case, "prompts")
    model = chunks[0].eval()
    engine = CpuEngine(model, config, stop_token_ids=[], max_length=1024)

    def generate(temperature: float, count: int) -> tuple[float, list[Completion]]:
        start = time.perf_counter()
        completions = engine.generate(
            prompts,
            range(len(prompts)),
            Sampling(temperature=temperature, max_new_tokens=count, seed=1),
            weight_version=1,
        )
        return time.perf_counter() - start, completions

    generate(0.0, 8)
    greedy, completions = generate(0.0, new)
    sampled, draws = generate(1.0, new)
    multiplied = sum(p.numel() for p in model.parameters())
    multiplied -= model.embedding.word_embeddings.weight.numel()
    step = max(
        4 * multiplied / limits.read_rate(), 2 * multiplied * len(prompts) / limits.gemm_rate()
    )
    return {
        "seconds": {"greedy": greedy, "sampled": sampled, "limit": step * new},
        "tokens": [one.token_ids for one in completions],
        "log_probs": [one.log_probs for one in completions],
        "draws": [one.token_ids for one in draws],
        "draw_log_probs": [one.log_probs for one in draws],
    }


if __name__ == "__main__":
    program.run(work)
