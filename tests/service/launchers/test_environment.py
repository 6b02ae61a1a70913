import os
from pathlib import Path

from environments.question_files import ROOTS_VARIABLE
from service.launchers.environment import driver_environment
from service.settings import DATA_ROOTS_VARIABLE


def test_a_driver_gets_what_it_needs_and_no_secret() -> None:
    service = {
        "PATH": "/bin",
        "HOME": "/home/planish",
        "LC_ALL": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": "0",
        "PLANISH_BOOTSTRAP_KEY": "planish_secret",
        "PLANISH_ATTEMPT": "7",
        "PLANISH_DATA_ROOTS": "/",
        "HF_TOKEN": "hf_secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "DATABASE_URL": "postgresql://u:secret@host/planish",
    }
    seen = driver_environment(service, "job-a", 2, [Path("/data"), Path("/more")])
    assert seen == {
        "PATH": "/bin",
        "HOME": "/home/planish",
        "LC_ALL": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": "0",
        "PLANISH_JOB_ID": "job-a",
        "PLANISH_ATTEMPT": "2",
        "PLANISH_DATA_ROOTS": f"/data{os.pathsep}/more",
        "PYTHONUNBUFFERED": "1",
        "SPT_NOENV": "1",
    }


def test_only_a_job_with_a_storage_gets_the_storages_secret() -> None:
    service = {"AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL": "http://s3"}
    assert service.items() <= driver_environment(service, "job-a", 1, storage=True).items()
    assert "secret" not in driver_environment(service, "job-a", 1).values()


def test_without_data_roots_a_driver_may_read_no_file_of_questions() -> None:
    assert driver_environment({}, "job-a", 2)["PLANISH_DATA_ROOTS"] == ""


def test_environments_and_service_call_the_variable_alike() -> None:
    assert DATA_ROOTS_VARIABLE == ROOTS_VARIABLE
