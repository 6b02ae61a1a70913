"""RankWorker from a JobContext to exported weights, under several layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from algorithms.batch import Normalizer
from megatron_backend.models.tensors import SINGLE_FILE, RandomTensors
from megatron_backend.training.shares import gather_rows
from megatron_backend.workers.rank import RankWorker
from service.spec import JobContext
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import CONFIGS, save_random
from tests.megatron_backend.training.training_runs import random_batch
from tests.ports import free_port

LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2), Layout(dp=2)]


def job(model: dict[str, Any], layout: Layout, *, kl_coef: float = 0.1) -> JobContext:
    """A GRPO job on `model` (the JSON of a ResolvedModel)."""
    source = {"init": {"config": {}, "tokenizer": "t"}}
    spec = {
        "name": "test",
        "model": source,
        "algorithm": {"type": "grpo", "kl_coef": kl_coef},
        "environment": {"id": "tools/calculator"},
        "training": {"steps": 1, "seed": 5, "max_length": 64, "micro_batch_size": 2},
        "parallel": {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp},
        "rollout": {"temperature": 0.5},
    }
    return JobContext.model_validate(
        {"job_id": "job-1", "spec": spec, "dp": layout.dp, "model": model}
    )


def play(
    rank: int, layout: Layout, context: JobContext, port: int, export: Path
) -> tuple[Tensor | None, Tensor | None, Tensor | None, bool]:
    """Log-probs, one step, log-probs of policy and reference after it, and an export."""
    from megatron_backend.runtime import distributed

    distributed.shutdown()  # the harness has joined the ranks already; the worker does it itself
    worker = RankWorker(rank, layout)
    worker.setup(context, "127.0.0.1", port)
    batch = random_batch()
    before = worker.log_probs(batch)
    share = worker.train_step(batch, Normalizer.of(batch), learning_rate=1e-2)
    after = worker.log_probs(batch)
    reference = worker.log_probs(batch, model="reference")
    worker.evaluate_loss(batch, Normalizer.of(batch))
    worker.export_hf(str(export))
    worker.shutdown()
    return before, after, reference, share.finite


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_reference_stays_as_the_job_started(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    hf = save_random("qwen2-tied", tmp_path / "start")
    model = {
        "kind": "huggingface",
        "config": CONFIGS["qwen2-tied"],
        "tokenizer": str(tmp_path / "start"),
        "weights": str(tmp_path / "start"),
    }
    context = job(model, layout)
    results = ranks.run(layout, play, layout, context, free_port(), tmp_path / "end")
    before, after, reference, finite = zip(*results, strict=True)
    batch = random_batch()
    with torch.no_grad():
        logits = hf(batch.tokens).logits / 0.5
    expected = torch.log_softmax(logits[:, :-1], -1).gather(-1, batch.tokens[:, 1:, None])[..., 0]
    trained = batch.loss_mask[:, 1:].bool()
    start = gather_rows(layout, before)
    torch.testing.assert_close(start[:, 1:][trained], expected[trained], rtol=1e-4, atol=1e-4)
    assert not start[:, 1:][~trained].any(), "only where the loss looks"
    torch.testing.assert_close(gather_rows(layout, reference), start)
    assert all(finite)
    assert not torch.allclose(gather_rows(layout, after), start, atol=1e-3)
    end = load_file(tmp_path / "end" / SINGLE_FILE)
    first = load_file(tmp_path / "start" / SINGLE_FILE)
    assert end.keys() == first.keys()
    assert not torch.equal(end["model.norm.weight"], first["model.norm.weight"])


def start_random(rank: int, layout: Layout, context: JobContext, port: int, export: Path) -> None:
    """Exports a job's random start."""
    from megatron_backend.runtime import distributed

    distributed.shutdown()
    worker = RankWorker(rank, layout)
    worker.setup(context, "127.0.0.1", port)
    batch = random_batch(rows=2)
    with pytest.raises(RuntimeError, match="keeps no reference model"):
        worker.log_probs(batch, model="reference")
    worker.export_hf(str(export))
    worker.shutdown()


def test_a_random_start_comes_from_the_jobs_seed(ranks: Ranks, tmp_path: Path) -> None:
    layout = Layout(tp=2)
    model = {"kind": "random", "config": CONFIGS["qwen3"], "tokenizer": str(tmp_path)}
    context = job(model, layout, kl_coef=0.0)
    ranks.run(layout, start_random, layout, context, free_port(), tmp_path / "end")
    source = RandomTensors(ModelConfig.from_hf(CONFIGS["qwen3"]), seed=5)
    for name, tensor in load_file(tmp_path / "end" / SINGLE_FILE).items():
        assert torch.equal(tensor, source.read(name))


def test_a_worker_without_a_job_says_so() -> None:
    worker = RankWorker(0, Layout())
    for read in (lambda: worker.trainer, lambda: worker.config, lambda: worker.dtype):
        with pytest.raises(RuntimeError, match="call setup first"):
            read()


def test_an_impossible_layout_is_refused_before_ranks_join() -> None:
    layout = Layout(tp=3)
    model = {"kind": "random", "config": CONFIGS["qwen3"], "tokenizer": "t"}
    with pytest.raises(ValueError, match="tp = 3 does not divide"):
        RankWorker(0, layout).setup(job(model, layout), "127.0.0.1", 1)
