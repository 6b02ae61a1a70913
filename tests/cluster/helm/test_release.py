"""Install, upgrade, rollback and uninstall, on a real node with the real image."""

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.helm.conftest import CHART, Programs
from tests.cluster.helm.postgres import postgres
from tests.cluster.helm.release import WAIT, Release, upload

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]

ROWS = [{"messages": [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]}]
# Connects to nothing until a job comes.
CLUSTERS = {"lab": {"type": "ray_jobs", "address": "http://ray.invalid:8265"}}


@pytest.fixture
def values(control_plane: Mapping[str, Any], host_folder: Path) -> dict[str, Any]:
    return {
        **control_plane,
        "storage": {
            "type": "hostPath",
            "path": str(host_folder),
            "hostPath": {"path": str(host_folder)},
        },
        "clusters": CLUSTERS,
    }


@pytest.fixture
def release(
    programs: Programs, namespace: str, tmp_path: Path, values: dict[str, Any]
) -> Iterator[Release]:
    made = Release(programs=programs, namespace=namespace, values=tmp_path / "values.yaml")
    made.write(values)
    yield made
    made.helm("uninstall", "--ignore-not-found", "--wait", check=False)


@pytest.fixture
def previous(programs: Programs, tmp_path: Path) -> Path:
    """This chart under an earlier version's number, with another default: no other is published."""
    source = tmp_path / "previous"
    shutil.copytree(CHART, source)
    text = (source / "values.yaml").read_text()
    assert "  accessLog: false\n" in text
    (source / "values.yaml").write_text(text.replace("  accessLog: false\n", "  accessLog: true\n"))
    programs.helm("package", str(source), "--version", "0.0.9", "-d", str(tmp_path))
    return tmp_path / "planish-0.0.9.tgz"


def _file_is_known(release: Release, file: str) -> bool:
    with release.api() as api:
        return api.get(f"/v1/files/{file}").status_code == 200


def test_an_upgrade_and_a_rollback_lose_nothing_and_uninstall_leaves_nothing(
    release: Release, previous: Path
) -> None:
    release.install(previous, *WAIT)
    assert "Phase:          Succeeded" in release.helm("test")
    key, first_pods = release.key(), release.pods()
    with release.api() as api:
        assert api.get("/v1/jobs", headers={"authorization": ""}).status_code == 401
        file = upload(api, ROWS)

    release.upgrade(CHART, *WAIT)
    assert release.key() == key
    assert not release.pods() & first_pods
    assert _file_is_known(release, file)

    release.helm("rollback", "1", *WAIT)
    assert release.key() == key
    assert _file_is_known(release, file)
    assert "planish-0.0.9" in release.helm("history").splitlines()[-1]

    release.helm("uninstall", "--wait")
    assert release.left_after(60, set()) == set()


def test_replicas_share_an_external_postgres(release: Release, values: dict[str, Any]) -> None:
    with postgres() as url:
        external = values | {"database": {"url": url}, "replicas": 2}
        release.write(external)
        release.install(CHART, *WAIT)
        pods = release.pods()
        assert len(pods) == 2
        with release.api() as api:
            file = upload(api, ROWS)
        for pod in pods:  # the Service chooses one; a pod asked by its name is that one
            log = release.programs.kubectl("-n", release.namespace, "logs", pod).stdout
            assert "Traceback" not in log
        assert _file_is_known(release, file)

        # A database that is not there stops the upgrade, and the service goes on.
        nowhere = url.rpartition("@")[0] + "@127.0.0.1:1/postgres"
        release.write(
            {
                **external,
                "database": {"url": nowhere},
                "migrations": {"activeDeadlineSeconds": 10},
            }
        )
        said = release.upgrade(CHART, *WAIT, check=False)
        assert "pre-upgrade hooks failed" in said
        assert release.pods() == pods
        assert _file_is_known(release, file)

        release.helm("uninstall", "--wait")
        # The failed hook stays to be looked at.
        left = release.left_after(60, set())
        assert {name.partition("/")[0] for name in left} <= {"Job", "Pod", "Secret"}
        assert all("migrations" in name for name in left)


def test_uninstall_leaves_what_its_notes_say(release: Release, values: dict[str, Any]) -> None:
    for changes, kept in (
        (
            {"storage": {"type": "claim"}},
            {
                "PersistentVolumeClaim/trial-planish-jobs",
                "PersistentVolumeClaim/trial-planish-database",
            },
        ),
        (
            {
                "storage": {"type": "claim", "claim": {"keep": False}},
                "postgresql": {"enabled": True},
            },
            {
                "Secret/trial-planish-database",
                "PersistentVolumeClaim/data-trial-planish-postgresql-0",
            },
        ),
    ):
        # Nothing here gives out volumes, so no pod of it starts; what is left does not go by that.
        release.write(values | changes)
        notes = release.install(CHART).partition("What `helm uninstall` leaves:")[2]
        release.wait_for(kept)
        release.helm("uninstall")
        assert release.left_after(60, kept) == kept
        for name in kept:
            assert name.partition("/")[2] in notes
        release.programs.kubectl(
            "-n", release.namespace, "delete", "pvc,secret", "--all", "--wait=false"
        )


def test_the_account_of_the_service_may_do_what_its_role_says_and_no_more(
    release: Release, values: dict[str, Any]
) -> None:
    release.write(values | {"clusters": {"k8s": {"type": "kuberay", "image": "worker:1"}}})
    release.install(CHART)
    account = f"system:serviceaccount:{release.namespace}:trial-planish"

    def granted(namespace: str) -> dict[str, set[str]]:
        said = release.programs.kubectl(
            "auth", "can-i", "--list", "--no-headers", "-n", namespace, "--as", account
        ).stdout
        rows = re.findall(r"^(\S+) +\[.*\] +\[.*\] +\[(.*)\]$", said, re.MULTILINE)
        # What every account may do is to ask what it may do.
        return {kind: set(verbs.split()) for kind, verbs in rows if "self" not in kind}

    assert granted(release.namespace) == {
        "rayjobs.ray.io": {"create", "get", "list", "watch", "delete"},
        "pods": {"list", "watch", "delete"},
        "events": {"list"},
    }
    assert granted("default") == {}
