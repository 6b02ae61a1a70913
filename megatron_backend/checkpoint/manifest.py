"""manifest.json: what a published checkpoint holds, with sizes and SHA-256 of every file."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

NAME = "manifest.json"
FORMAT = 1


class CorruptCheckpoint(Exception):
    """A checkpoint is not what its manifest says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Size in bytes and SHA-256 (hex) of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint is and holds.

    Attributes:
        step: optimizer (or rollout) steps done.
        attempt: the attempt that published it.
        layout: tp, pp and dp of the ranks that wrote it; any other layout can load it.
        created_at: ISO 8601, UTC.
        files: path inside the folder (with /) to size and hash; all files but the manifest.
    """

    step: int
    attempt: int
    layout: Mapping[str, int]
    created_at: str
    files: Mapping[str, FileEntry]

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.size for entry in self.files.values())

    def to_json(self) -> str:
        """The manifest's text."""
        return json.dumps({"format": FORMAT} | asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parses `to_json`'s text.

        Raises:
            CorruptCheckpoint: it is no manifest, or of a format that this release cannot read.
        """
        try:
            document: dict[str, Any] = json.loads(text)
            version = document.pop("format")
            if version != FORMAT:
                raise CorruptCheckpoint(f"manifest format {version} is not {FORMAT}")
            files = {
                name: FileEntry(size=int(entry["size"]), sha256=str(entry["sha256"]))
                for name, entry in document.pop("files").items()
            }
            return cls(files=files, **document)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpoint(f"{NAME} does not parse: {error!r}") from error


def describe_files(folder: Path) -> dict[str, FileEntry]:
    """Size and hash of every file in a folder but the manifest."""
    names = _file_names(folder)
    # hashlib lets go of the GIL, so threads read and hash in parallel.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: _describe(folder / name), names), strict=True))


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint, without a look at the other files.

    Raises:
        CorruptCheckpoint: there is none, or it does not parse.
    """
    try:
        text = (folder / NAME).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{folder.name} has no {NAME}") from error
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"{folder.name}/{NAME} is not text") from error
    return Manifest.from_json(text)


def verify(folder: Path) -> Manifest:
    """The manifest, once every file has the size and the hash that it names.

    Raises:
        CorruptCheckpoint: says which file is wrong.
        OSError: the storage could not be read, which says nothing about the checkpoint.
    """
    manifest = read(folder)
    missing = manifest.files.keys() - set(_file_names(folder))
    if missing:
        raise CorruptCheckpoint(f"{folder.name} lacks {sorted(missing)[0]}")
    for name, entry in manifest.files.items():
        size = (folder / name).stat().st_size
        if size != entry.size:
            raise CorruptCheckpoint(
                f"{folder.name}/{name} has {size} bytes, its manifest says {entry.size}"
            )
    found = describe_files(folder)
    for name, entry in manifest.files.items():
        if found[name] != entry:
            raise CorruptCheckpoint(f"{folder.name}/{name} does not have its manifest's SHA-256")
    return manifest


def _file_names(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path != folder / NAME
    )


def _describe(path: Path) -> FileEntry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(size=file.tell(), sha256=digest)
