from pathlib import Path

import pytest

from service.launchers import LaunchRequest
from service.launchers.slurm.launcher import SlurmLauncher
from tests.service.launchers.slurm.scripted import JOB, ScriptedSlurm, launcher_of
from tests.service.store.sample_jobs import context, document


@pytest.fixture
def slurm() -> ScriptedSlurm:
    return ScriptedSlurm()


@pytest.fixture
def launcher(slurm: ScriptedSlurm, tmp_path: Path) -> SlurmLauncher:
    return launcher_of(slurm, tmp_path)


@pytest.fixture
def request_(tmp_path: Path) -> LaunchRequest:
    resolved = context(document(resources={"cluster": "slurm"}), JOB)
    return LaunchRequest(job_id=JOB, attempt=1, job_dir=tmp_path / JOB, context=resolved)
