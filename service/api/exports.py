"""The newest Hugging Face export of a job, as a tar stream of a length that is known before."""

import os
import tarfile
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from service.api.context import Caller, Service
from service.api.problems import Refusal
from service.artifacts import newest_export

router = APIRouter(prefix="/v1", tags=["jobs"])

_CHUNK = 1024 * 1024
_BLOCK = tarfile.BLOCKSIZE
MEDIA_TYPE = "application/x-tar"


@router.get(
    "/jobs/{job}/export",
    response_class=StreamingResponse,
    responses={200: {"content": {MEDIA_TYPE: {}}}},
)
def download_export(job: str, service: Service, _caller: Caller) -> StreamingResponse:
    """The files of the newest export, weights and tokenizer, in one folder `NAME-step-N`."""
    found = service.find_job(job)
    export = newest_export(service.folder(found).exports_path)
    if export is None:
        raise Refusal(
            HTTPStatus.NOT_FOUND,
            f"job {found.id} ({found.state}) has no export; one is written when it ends well, "
            "unless checkpoint.export is false",
            kind="no-export",
        )
    folder = f"{found.name}-step-{export.step}"
    members = _members(export.path, folder)
    size = sum(len(header) + _padded(size) for header, size, _ in members) + 2 * _BLOCK
    return StreamingResponse(
        _tar(members),
        media_type=MEDIA_TYPE,
        headers={
            # With the length a client can tell a whole archive from one that was cut off.
            "content-length": str(size),
            "content-disposition": f'attachment; filename="{folder}.tar"',
        },
    )


def _members(root: Path, folder: str) -> list[tuple[bytes, int, Path]]:
    """Header, size and path of the regular files of an export.

    Links are left out: they could lead anywhere.
    """
    members = []
    for path in sorted(root.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        stat = path.stat()
        info = tarfile.TarInfo(f"{folder}/{path.relative_to(root).as_posix()}")
        info.size, info.mtime, info.mode = stat.st_size, int(stat.st_mtime), 0o644
        members.append((info.tobuf(tarfile.GNU_FORMAT), info.size, path))
    return members


def _tar(members: list[tuple[bytes, int, Path]]) -> Iterator[bytes]:
    for header, size, path in members:
        yield header
        left = size
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            while left:
                data = file.read(min(_CHUNK, left))
                if not data:
                    raise OSError(f"{path} became shorter while it was sent")
                left -= len(data)
                yield data
        yield bytes(_padded(size) - size)
    yield bytes(2 * _BLOCK)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
