"""What the ranks of a model that only reads do in test_frozen.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_backend.training.shares import RowShare
from megatron_backend.workers.frozen import ScorerRank, TeacherRank
from service.spec import JobContext
from service.spec.layout import Layout
from tests.megatron_backend.small_models import CONFIGS
from tests.megatron_backend.training.training_runs import random_batch

TEMPERATURE = 0.7
STUDENT_VOCABULARY = 97
"""Less than the teacher's 101: rows that pad an embedding are no tokens of either."""


def distillation(
    folder: Path, config: Mapping[str, Any], layout: Layout, **training: Any
) -> JobContext:
    """A job whose teacher lies in `folder`."""
    frozen = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}
    source = {"init": {"config": {}, "tokenizer": "t"}}
    student = CONFIGS["qwen3"] | {"vocab_size": STUDENT_VOCABULARY}
    spec = {
        "name": "test",
        "model": source,
        "algorithm": {
            "type": "distillation",
            "teacher_model": {"source": {"path": "t"}, "layout": frozen},
        },
        "environment": {"id": "tools/calculator"},
        "training": {"steps": 1, "seed": 5, "max_length": 64, **training},
        "rollout": {"temperature": TEMPERATURE},
    }
    document = {
        "job_id": "job-1",
        "spec": spec,
        "dp": 1,
        "model": {"kind": "random", "config": student, "tokenizer": "t"},
        "other_models": {
            "teacher": {
                "kind": "huggingface",
                "config": dict(config),
                "tokenizer": str(folder),
                "weights": str(folder),
            }
        },
    }
    return JobContext.model_validate(document)


def teach(
    rank: int,
    layout: Layout,
    contexts: Mapping[int, JobContext],
    counts: Sequence[int],
) -> list[list[list[RowShare] | None]]:
    """What a teacher says of a batch for each of `counts`, in each of some jobs, by their ports."""
    from megatron_backend.runtime import distributed

    distributed.shutdown()  # the harness has joined the ranks already; the worker does it itself
    results = []
    for port, context in contexts.items():
        worker = TeacherRank(rank, layout)
        worker.setup(context, "127.0.0.1", port)
        results.append([worker.likeliest(random_batch(rows=7), count) for count in counts])
        worker.shutdown()
    return results


def score(
    rank: int, layout: Layout, contexts: Mapping[int, JobContext]
) -> list[list[RowShare] | None]:
    """What a reward model says of a batch, in each of some jobs, by their ports."""
    from megatron_backend.runtime import distributed

    distributed.shutdown()
    results = []
    for port, context in contexts.items():
        worker = ScorerRank(rank, layout)
        worker.setup(context, "127.0.0.1", port)
        results.append(worker.scores(random_batch(rows=7)))
        worker.shutdown()
    return results
