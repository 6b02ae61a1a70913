"""Case G23, the disk's side: content lies under ids of our own, whole or not at all."""

import errno
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from service.files.storage import (
    ABANDONED_SECONDS,
    UploadTooLarge,
    content_path,
    receive,
    sweep,
)

ID = "file-0123456789abcdef"


def test_published_content_is_whole_and_the_temporary_name_is_gone(tmp_path: Path) -> None:
    with receive(tmp_path, limit=100) as incoming:
        incoming.write(b"ab")
        incoming.write(b"c")
        stored = incoming.finish()
        place = incoming.publish(ID)
    assert stored.bytes == 3
    assert stored.sha256 == hashlib.sha256(b"abc").hexdigest()
    assert place.read_bytes() == b"abc"
    assert [entry.name for entry in tmp_path.iterdir()] == [ID]


def test_what_is_not_published_leaves_nothing(tmp_path: Path) -> None:
    with receive(tmp_path, limit=100) as incoming:
        incoming.write(b"abc")
        incoming.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_byte_too_many_is_refused(tmp_path: Path) -> None:
    with receive(tmp_path, limit=3) as incoming:
        incoming.write(b"abc")
        with pytest.raises(UploadTooLarge):
            incoming.write(b"d")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_an_upload_that_fills_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with receive(tmp_path, limit=3) as incoming:
        incoming._file.close()
        monkeypatch.setattr(incoming, "_file", SimpleNamespace(flush=full, close=full))
        with pytest.raises(OSError, match="no space left"):
            incoming.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_link_under_the_id_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    root = tmp_path / "files"
    root.mkdir()
    (root / ID).symlink_to(outside)
    with receive(root, limit=3) as incoming:
        incoming.write(b"abc")
        incoming.finish()
        with pytest.raises(FileExistsError):
            incoming.publish(ID)
    assert not outside.exists()


@pytest.mark.parametrize("name", ["../x", "file-", "/etc/passwd", "file-0123456789ABCDEF", ""])
def test_other_ids_have_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no file id"):
        content_path(tmp_path, name)


def test_sweep_removes_what_nobody_refers_to_once_it_is_old(tmp_path: Path) -> None:
    names = [ID, "file-fedcba9876543210", ".incoming-1", ".incoming-2", "notes.txt"]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
        if name != ".incoming-2":
            old = (tmp_path / name).stat().st_mtime - ABANDONED_SECONDS - 1
            os.utime(tmp_path / name, (old, old))
    assert sorted(sweep(tmp_path, {ID})) == [".incoming-1", "file-fedcba9876543210"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".incoming-2", ID, "notes.txt"]


def test_sweep_does_not_miss_what_another_service_removes_meanwhile(tmp_path: Path) -> None:
    class Removing(set[str]):
        def __contains__(self, name: object) -> bool:
            (tmp_path / str(name)).unlink()
            return False

    (tmp_path / ".incoming-1").write_bytes(b"x")
    assert sweep(tmp_path, Removing()) == []
