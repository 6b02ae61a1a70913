"""SFT steps of our trainer on one rank.

Options: `batch` rows a step, `steps` that are timed after one that is not, `rate`, and `packing`;
without it all rows of a step are padded to the longest and go through the model at once. With
`time_all` the first step is timed too.
"""

import time
from pathlib import Path
from typing import Any

import torch

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, Normalizer, pad_rows
from service.spec import OptimizerSpec, SftSpec
from service.spec.layout import Layout
from tests.bench import cases
from tests.bench.sides import limits, program, single_rank


def work(case: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Trains, and gives each step's loss and the seconds of all timed ones."""
    chunks, config = single_rank.load_model(case)
    from megatron_backend.training.step import Trainer

    batch, steps, packing = options["batch"], options["steps"], options["packing"]
    trainer = Trainer(
        chunks,
        config,
        Layout(),
        loss=load_algorithm(SftSpec()),
        optimizer_spec=OptimizerSpec(
            betas=[0.9, 0.999], epsilon=1e-8, weight_decay=0.0, clip_grad=1.0
        ),
        dtype=torch.float32,
        micro_batch_size=None if packing else batch,
        packing=packing,
    )
    rows = cases.read(case, "rows")
    first = 0 if options.get("time_all") else 1
    losses, trained, start, tokens, longest = [], [], 0.0, 0, 0
    for step in range(steps + 1):
        if step == first:
            start = time.perf_counter()
        part = rows[step * batch : (step + 1) * batch]
        whole = _batch(part)
        share = trainer.train_step(whole, Normalizer.of(whole), learning_rate=options["rate"])
        losses.append(share.loss)
        trained.append(int(whole.loss_mask.sum()))
        if step >= first:
            tokens += sum(map(len, part))
            longest += batch * max(map(len, part))
    seconds = time.perf_counter() - start
    matrices = sum(p.numel() for chunk in chunks for p in chunk.parameters())
    matrices -= chunks[0].embedding.word_embeddings.weight.numel()  # looked up, not multiplied
    return {
        "seconds": {"steps": seconds, "limit": 6 * matrices * tokens / limits.gemm_rate()},
        "losses": losses,
        "trained": trained,
        "tokens": tokens,
        "padding_ratio": longest / tokens,
    }


def _batch(rows: list[list[int]]) -> Batch:
    tokens = pad_rows(rows, value=0, dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in rows])
    places = torch.arange(tokens.shape[1])
    # Nothing predicts a row's first token.
    mask = (places > 0) & (places < lengths[:, None])
    return Batch(tokens=tokens, lengths=lengths, loss_mask=mask.float())


if __name__ == "__main__":
    program.run(work)
