"""Exports as a tar stream, and the client's way of unpacking one."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.client import ApiError, Client
from service.client.archive import unpack
from tests.service.running_service import KEY, RunningService

FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 5000,
    "empty": b"",
    "sub/exactly-one-block": b"x" * 512,
    "sub/" + "n" * 150: b"a long name",
}


def write_export(service: RunningService, job: str, step: int) -> Path:
    folder = service.settings.jobs_dir / job / "exports" / f"step-{step:08d}"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def exported(service: RunningService) -> tuple[RunningService, str]:
    job = service.submit(name="exported")["id"]
    write_export(service, job, 20)
    (service.settings.jobs_dir / job / "exports" / ".tmp-00000030").mkdir()
    return service, job


def test_the_newest_export_comes_whole_with_its_length(
    exported: tuple[RunningService, str], tmp_path: Path
) -> None:
    service, job = exported
    newest = write_export(service, job, 30)
    (newest / "link").symlink_to("/etc/passwd")
    answer = service.http.get(f"/v1/jobs/{job}/export")
    assert answer.headers["content-type"] == "application/x-tar"
    assert int(answer.headers["content-length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / "exported-step-30"
    found = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }
    assert found == FILES


def test_the_client_writes_an_export_into_a_folder(
    exported: tuple[RunningService, str], tmp_path: Path
) -> None:
    service, job = exported
    seen: list[tuple[int, int]] = []
    to = tmp_path / "new" / "model"
    with Client(service.url, KEY) as client:
        written = client.download_export(job, to, on_progress=lambda *now: seen.append(now))
        assert sorted(p.relative_to(to).as_posix() for p in written) == sorted(FILES)
        assert (to / "model.safetensors").read_bytes() == FILES["model.safetensors"]
        assert seen[-1][0] == seen[-1][1] > 1_000_000
        with pytest.raises(FileExistsError, match="empty folder"):
            client.download_export(job, to)
    assert [entry.name for entry in to.parent.iterdir()] == ["model"]


def test_a_job_without_an_export_is_a_404(service: RunningService) -> None:
    job = service.submit()["id"]
    with Client(service.url, KEY) as client, pytest.raises(ApiError) as caught:
        client.download_export(job, Path("/nonexistent/x"))
    assert (caught.value.status, caught.value.kind) == (404, "no-export")


def tar_of(*names: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))
    return stream.getvalue()


@pytest.mark.parametrize("names", [("../x",), ("a/../../x",), ("a/x", "b/y"), ("x",), ()])
def test_an_archive_that_is_no_export_leaves_nothing(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    with pytest.raises(tarfile.TarError):
        unpack(iter([tar_of(*names)]), 0, tmp_path / "deep" / "to")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_stream_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield tar_of("a/x")[:700]
        raise ConnectionError("gone")

    with pytest.raises((ConnectionError, tarfile.TarError)):
        unpack(pieces(), 0, tmp_path / "to")
    assert list(tmp_path.iterdir()) == []
