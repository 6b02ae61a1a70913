"""A driver's and a rank's side of tracing, where it cannot be had: nothing else suffers."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
from megatron_backend import tracing
from service.spec import JobContext, JobSpec, ResolvedModel
from service.spec.layout import Layout
from service.spec.spans import JobTrace

import logging
logging.basicConfig(format="%(message)s")
spec = {
    "name": "a",
    "model": {"path": "m"},
    "algorithm": {"type": "sft"},
    "data": {"train": "file-0123456789abcdef"},
}
place = "00-" + "a" * 32 + "-" + "b" * 16 + "-FLAGS"
context = JobContext(
    job_id="job-1",
    spec=JobSpec.model_validate(spec),
    dp=1,
    model=ResolvedModel(kind="random", config={}, tokenizer="m"),
    trace=JobTrace(endpoint="http://127.0.0.1:9", traceparent=place),
)
attempt = tracing.AttemptTrace(context, 1)
print(tracing.place() is not None)
with tracing.span("step", 1), tracing.rank_span(context.trace, "train_step", Layout(), 0, ""):
    tracing.note_own_seconds(0.5)
tracing.flush()
attempt.close("USER_ERROR")
print(tracing.place() is not None)
"""


@pytest.mark.parametrize(
    ("first", "flags", "traced", "says"),
    [
        ("", "01", True, "traces are not taken at http://127.0.0.1:9"),
        ("", "00", False, ""),
        (
            "import sys; sys.modules['opentelemetry.exporter.otlp'] = None",
            "01",
            False,
            "no traces are made of this attempt: ",
        ),
        (
            "import os; os.environ['OTEL_BSP_MAX_QUEUE_SIZE'] = '-1'",
            "01",
            False,
            "no traces are made of this attempt: ValueError",
        ),
    ],
    ids=["away", "not-sampled", "not-installed", "wrong-variable"],
)
def test_what_cannot_be_traced_runs_all_the_same(
    first: str, flags: str, traced: bool, says: str
) -> None:
    code = f"{first}\n{PROGRAM.replace('FLAGS', flags)}"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(traced), "False"]
    lines = run.stderr.splitlines()
    assert len(lines) == bool(says), run.stderr
    assert all(line.startswith(says) for line in lines)
