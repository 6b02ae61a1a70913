from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from service.launchers import Site
from service.spec import JobSpec
from tests.service.launchers.kuberay.attempts import SITE, cluster
from tests.service.store.sample_jobs import document


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"env": {"HF_TOKEN": "hf_1234"}}, "env_from_secrets"),
        ({"env": {"PLANISH_ATTEMPT": "2"}}, "is set by the launcher"),
        ({"volumes": []}, "at least 1 item"),
        ({"volumes": [{"name": "a", "mount_path": "/a"}]}, "but has none"),
        (
            {"volumes": [{"name": "a", "mount_path": "/a", "claim": "c", "host_path": "/h"}]},
            "but has claim and host_path",
        ),
        ({"volumes": [{"name": "shm", "mount_path": "/a", "claim": "c"}]}, "is taken"),
        ({"volumes": [{"name": "a", "mount_path": "a/../b", "claim": "c"}]}, "absolute path"),
        (
            {
                "volumes": [
                    {"name": "a", "mount_path": "/a", "claim": "c"},
                    {"name": "b", "mount_path": "/a/", "claim": "d"},
                ]
            },
            "two volumes have the mount_path /a",
        ),
        ({"privileged": True}, "Extra inputs"),
        ({"image": "a b"}, "pattern"),
    ],
)
def test_a_config_that_cannot_be_is_refused_without_its_values(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        cluster(**options)
    assert said in str(refused.value)
    assert "hf_1234" not in str(refused.value)


def test_secrets_and_settings_can_be_mounted_but_not_written_to() -> None:
    config = cluster(
        volumes=[
            {"name": "jobs", "mount_path": "/data", "claim": "c", "sub_path": "planish"},
            {"name": "ca", "mount_path": "/ca", "secret": "certificates"},
            {"name": "nccl", "mount_path": "/nccl", "config_map": "topology"},
        ]
    )
    jobs, certificates, topology = config.volumes
    assert jobs.mount() == {"name": "jobs", "mountPath": "/data", "subPath": "planish"}
    assert certificates.source()["secret"] == {"secretName": "certificates", "defaultMode": 0o440}
    assert certificates.mount()["readOnly"] is True
    assert topology.source()["configMap"] == {"name": "topology"}
    assert topology.mount()["readOnly"] is True


def problems(site: Site, **resources: Any) -> list[str]:
    spec = JobSpec.model_validate(document(resources={"cluster": "k8s", **resources}))
    launcher = cluster().open(site)
    try:
        return [problem.field for problem in launcher.check(spec)]
    finally:
        launcher.close()


def test_a_job_is_checked_before_anybody_is_asked() -> None:
    assert problems(SITE) == []
    assert problems(SITE, slurm={"partition": "gpu"}) == ["resources.slurm"]
    assert problems(Site(jobs_dir=Path("/elsewhere"))) == ["resources.cluster"]
