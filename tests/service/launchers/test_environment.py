from service.launchers.environment import driver_environment


def test_a_driver_gets_what_it_needs_and_no_secret() -> None:
    service = {
        "PATH": "/bin",
        "HOME": "/home/planish",
        "LC_ALL": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": "0",
        "PLANISH_BOOTSTRAP_KEY": "planish_secret",
        "PLANISH_ATTEMPT": "7",
        "HF_TOKEN": "hf_secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "DATABASE_URL": "postgresql://u:secret@host/planish",
    }
    seen = driver_environment(service, "job-a", 2)
    assert seen == {
        "PATH": "/bin",
        "HOME": "/home/planish",
        "LC_ALL": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": "0",
        "PLANISH_JOB_ID": "job-a",
        "PLANISH_ATTEMPT": "2",
        "PYTHONUNBUFFERED": "1",
        "SPT_NOENV": "1",
    }
