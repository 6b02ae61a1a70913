"""Checkpoints that are copied to another storage, and fetched from there."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from algorithms.errors import JobFailure
from tests.megatron_backend.driver.saves import Saves, children


def copies(bucket: Any) -> dict[str, int]:
    """How many objects each copied checkpoint has."""
    names = [key.key.split("/") for key in bucket.objects.all()]
    assert all(name[:2] == ["runs", "job-1"] for name in names)
    steps = [name[2] for name in names]
    return {step: steps.count(step) for step in sorted(set(steps))}


def credentials(bucket: Any) -> None:
    """What the service gives each attempt anew."""
    client = bucket.meta.client
    os.environ["AWS_ENDPOINT_URL"] = client.meta.endpoint_url
    os.environ["AWS_ACCESS_KEY_ID"] = "key"
    os.environ["AWS_SECRET_ACCESS_KEY"] = "secret-of-the-storage"


def test_a_job_without_its_disk_goes_on_from_the_storage(
    open_saves: Callable[..., Saves], bucket: Any
) -> None:
    saves = open_saves(
        storage="s3://planish-tests/runs",
        keep_last=1,
        keep_best={"metric": "accuracy"},
        async_save=True,
    )
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ  # neither ranks nor environments see it
    for step, accuracy in ((1, 0.5), (2, 0.75), (3, 0.25)):
        saves.save(step, evaluations=[{"accuracy": accuracy}])
    saves.checkpoints.drain()
    files = sum(1 for path in (saves.root / "step-00000003").rglob("*") if path.is_file())
    assert copies(bucket) == {"step-00000002": files, "step-00000003": files}

    shutil.rmtree(saves.root)
    credentials(bucket)
    again = open_saves(attempt=2)
    assert again.resumed() == 3
    again.save(4)
    again.checkpoints.drain()
    assert list(copies(bucket)) == ["step-00000002", "step-00000004"]  # the best is known still
    assert again.latest() == "step-00000004"

    shutil.rmtree(again.root)
    name = next(key for key in bucket.objects.filter(Prefix="runs/job-1/step-00000004/state"))
    name.put(Body=b"damaged")
    credentials(bucket)
    third = open_saves(attempt=3)
    assert third.resumed() == 2
    (warning,) = third.events.of("warning")
    assert "step-00000004 is damaged" in warning["message"]
    third.save(3)
    third.checkpoints.drain()  # a damaged copy takes no place from a good one
    assert list(copies(bucket)) == ["step-00000002", "step-00000003", "step-00000004"]


def test_d20_a_copy_that_the_storage_refuses(open_saves: Callable[..., Saves], bucket: Any) -> None:
    saves = open_saves(storage="s3://planish-tests/runs", save_retries=0, max_missed=1)
    bucket.delete()
    saves.save(1)
    saves.checkpoints.drain()
    (warning,) = saves.events.of("warning")
    assert "step 1 could not be copied to the storage" in warning["message"]
    assert "secret-of-the-storage" not in json.dumps(saves.events.events)
    assert saves.latest() == "step-00000001"  # the folder has it all the same
    bucket.create()
    saves.save(2)
    saves.checkpoints.drain()
    assert list(copies(bucket)) == ["step-00000002"]
    bucket.objects.delete()
    bucket.delete()
    saves.save(3)
    saves.checkpoints.drain()
    assert len(saves.events.of("warning")) == 2  # not two in a row
    saves.save(4)
    with pytest.raises(JobFailure, match="2 in a row"):
        saves.checkpoints.drain()
    bucket.create()


def test_a_checkpoint_that_a_dead_driver_did_not_copy(
    open_saves: Callable[..., Saves], bucket: Any
) -> None:
    saves = open_saves(storage="s3://planish-tests/runs", save_retries=0)
    saves.save(1)
    (copy,) = children("megatron_backend.checkpoint.transfer")
    copy.kill()
    saves.checkpoints.drain()
    assert copies(bucket) == {}
    credentials(bucket)
    again = open_saves(attempt=2)
    assert again.resumed() == 1
    again.checkpoints.drain()
    assert again.events.of("warning") == []
    assert list(copies(bucket)) == ["step-00000001"]
    (first, *_) = bucket.objects.all()
    credentials(bucket)
    third = open_saves(attempt=3)
    third.checkpoints.drain()
    assert next(iter(bucket.objects.all())).last_modified == first.last_modified  # not once more


COPYING = """
import os, signal, sys, time
from pathlib import Path
from tests.megatron_backend.driver.saves import Saves, children
saves = Saves(Path(sys.argv[1]), storage="s3://planish-tests/runs")
saves.save(1)
(copy,) = children("megatron_backend.checkpoint.transfer")
copy.suspend()
print(copy.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_copy_ends_with_its_driver(bucket: Any, tmp_path: Path) -> None:
    job = tmp_path / "job"
    run = subprocess.run(
        [sys.executable, "-c", COPYING, str(job)], stdout=subprocess.PIPE, check=False
    )
    assert run.returncode == -signal.SIGKILL
    assert (job / "checkpoints" / "latest").read_text() == "step-00000001\n"
    orphan = psutil.Process(int(run.stdout))
    orphan.resume()
    assert not psutil.wait_procs([orphan], timeout=60)[1]
    assert copies(bucket) == {}


def test_a_copy_outlives_a_signal_to_the_drivers_group(
    open_saves: Callable[..., Saves], bucket: Any
) -> None:
    saves = open_saves(storage="s3://planish-tests/runs")
    saves.save(1)
    (copy,) = children("megatron_backend.checkpoint.transfer")
    assert os.getpgid(copy.pid) != os.getpgrp()
    saves.checkpoints.drain()
    assert list(copies(bucket)) == ["step-00000001"]
