"""Which ranks a job's other models have."""

from pathlib import Path

import pytest

from megatron_backend.driver.job import Job
from service.spec import JobContext
from service.spec.layout import Layout
from tests.megatron_backend.small_models import CONFIGS
from tests.megatron_backend.workers.frozen_ranks import distillation


@pytest.mark.parametrize(
    ("model", "split"), [("qwen3", False), ("qwen3_moe", True)], ids=["dense", "experts"]
)
def test_a_teacher_has_ranks_beside_those_of_training(
    tmp_path: Path, model: str, split: bool
) -> None:
    """Megatron has experts under tensor parallelism only where the sequence is split."""
    context = distillation(tmp_path, CONFIGS[model], Layout(tp=2, dp=3))
    job = Job(folder=tmp_path, attempt=1, context=context.model_copy(update={"dp": 2}))
    expected = Layout(tp=2, dp=3, sequence_parallel=split)
    assert job.frozen_layouts == {"teacher": expected}
    assert job.processes == 2 + 6


def test_a_job_without_other_models_has_its_own_ranks_alone(tmp_path: Path) -> None:
    document = distillation(tmp_path, CONFIGS["qwen3"], Layout()).model_dump(mode="json")
    document["spec"]["algorithm"] = {"type": "grpo"}
    context = JobContext.model_validate(document)
    job = Job(folder=tmp_path, attempt=1, context=context)
    assert job.frozen_layouts == {}
    assert job.processes == 1
