import errno
import os
import socket
from pathlib import Path

import pytest

from megatron_backend.checkpoint.fence import Fence
from megatron_backend.checkpoint.publish import CheckpointStore, Owner
from megatron_backend.checkpoint.remote import RemoteCheckpoints
from megatron_backend.checkpoint.retention import Retention


def test_d21_a_storage_that_never_answers_holds_up_nobody_for_ever(tmp_path: Path) -> None:
    fence = Fence(tmp_path, 1)
    fence.take()
    store = CheckpointStore(tmp_path, fence, Owner(job="job-1", model="0"))
    store.open()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        remote = RemoteCheckpoints(
            "s3://bucket/job-1",
            job_dir=tmp_path,
            attempt=1,
            retention=Retention(last=1),
            deadline=3.0,
            environment=os.environ
            | {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
            },
        )
        with pytest.raises(OSError, match="no end within 3 s") as caught:
            remote.fetch_newest(store, pytest.fail)
    assert caught.value.errno == errno.ETIMEDOUT
