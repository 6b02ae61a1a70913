import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.jobs import new_job_id
from service.launchers import LaunchRequest
from service.launchers.processes import marked, send
from tests.service.store.sample_jobs import context, document


@pytest.fixture
def jobs_dir(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@pytest.fixture
def new_request(jobs_dir: Path) -> Iterator[Callable[[], LaunchRequest]]:
    """Makes requests to launch attempt 1 of new jobs; kills what is left of them at the end."""
    made: list[LaunchRequest] = []

    def make() -> LaunchRequest:
        resolved = context(document(), new_job_id())
        request = LaunchRequest(
            job_id=resolved.job_id,
            attempt=1,
            job_dir=jobs_dir / resolved.job_id,
            context=resolved,
        )
        request.job_dir.mkdir(parents=True)
        made.append(request)
        return request

    yield make
    for request in made:
        for process in marked(request.job_id, 1):
            send(process, signal.SIGKILL)
        scrubbed = request.job_dir / "children"
        if scrubbed.exists():
            for pid in scrubbed.read_text().split():
                if os.path.exists(f"/proc/{pid}"):
                    os.kill(int(pid), signal.SIGKILL)
