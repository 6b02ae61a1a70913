"""What tests of whole jobs on real clusters share: how a job is waited for, and how two are equal.

A job that lost what it ran on, and went on, must have become what the same job becomes in peace:
the same metrics step by step, and the same weights to the bit.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service.api.resources import JobResource, MetricsRow
from service.client import Client

_TIMED = ("seconds", "per_second", "memory")
"""In the names of metrics that tell how fast a step was, not what it did."""


def grpo_job(before: JobResource, *, name: str, **parts: Any) -> dict[str, Any]:
    """A short GRPO job on small sums, which goes on from another job's model."""
    return {
        "name": name,
        "model": {"from": f"job:{before.id}@latest"},
        "algorithm": {"type": "grpo", "group_size": 2},
        "environment": {
            "id": "reasoning_gym/chain_sum",
            "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        },
        "rollout": {"max_new_tokens": 4},
        **parts,
    }


def ended(client: Client, job: JobResource) -> JobResource:
    """The job, when it has ended well."""
    found = client.wait(job.id)
    log = client.log(job.id).text[-4000:] if found.attempts else ""
    assert found.state.value == "SUCCEEDED", (found.reason, found.message, log)
    return found


def until_checkpoint(client: Client, job: JobResource, attempt: int = 1) -> None:
    """Until the attempt has published its first checkpoint."""
    for event in client.events(job.id):
        if event.kind == "checkpoint" and event.attempt == attempt:
            return
    raise AssertionError(client.job(job.id).message)


def weights(client: Client, job: JobResource, folder: Path) -> str:
    """A digest of what the job made of its model."""
    client.download_export(job.id, folder / job.id)
    return hashlib.sha256((folder / job.id / "model.safetensors").read_bytes()).hexdigest()


def assert_as_calm(
    client: Client, job: JobResource, calm: JobResource, folder: Path, reasons: Sequence[str]
) -> None:
    """Each attempt went on from a checkpoint of the one before, and the result shows nothing.

    Args:
        client: of their service.
        job: what had faults.
        calm: the same job, which had none.
        folder: where exports may be put.
        reasons: why each attempt of `job` but the last ended.
    """
    assert [attempt.reason for attempt in calm.attempts] == [None]
    told = [(each.reason and each.reason.value, each.message) for each in job.attempts]
    assert [reason for reason, _ in told] == [*reasons, None], told
    started = [event for event in client.events(job.id) if event.kind == "started"]
    assert [event.attempt for event in started] == list(range(1, len(reasons) + 2))
    resumed = [event.data["resumed_from_step"] for event in started]
    assert resumed[0] is None
    assert all(step > 0 for step in resumed[1:])
    found, expected = client.metrics(job.id), client.metrics(calm.id)
    assert [row.step for row in found] == [row.step for row in expected]
    assert _untimed(found) == _untimed(expected)
    assert weights(client, job, folder) == weights(client, calm, folder)


def _untimed(metrics: list[MetricsRow]) -> list[dict[str, float]]:
    assert all({"loss", "gradient_norm"} <= row.values.keys() for row in metrics)
    return [
        {name: value for name, value in row.values.items() if not any(t in name for t in _TIMED)}
        for row in metrics
    ]
