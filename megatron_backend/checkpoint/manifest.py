"""manifest.json: what a published checkpoint is and holds, with size and SHA-256 of every file."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from megatron_backend.checkpoint.hashed_file import FileEntry
from service.spec.layout import Layout

NAME = "manifest.json"
FORMAT = 2


class CorruptCheckpoint(Exception):
    """A checkpoint is not what its manifest says."""


class RefusedCheckpoint(Exception):
    """A checkpoint may be whole, but is not one that this job can go on from."""


class UnsupportedCheckpoint(RefusedCheckpoint):
    """Another release wrote it, in a format that this one does not know."""


class ForeignCheckpoint(RefusedCheckpoint):
    """It is of another job, or of another model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint is and holds.

    Attributes:
        job: id of the job that published it.
        model: `model_digest` of its model's config.
        step: optimizer (or rollout) steps done.
        attempt: the attempt that published it.
        layout: of the ranks that wrote it; any other layout can load it.
        score: the number that `checkpoint.keep_best` compares; None where the step has none.
        created_at: ISO 8601, UTC.
        files: path inside the folder (with /) to size and hash; all files but the manifest.
    """

    job: str
    model: str
    step: int
    attempt: int
    layout: Layout
    score: float | None
    created_at: str
    files: Mapping[str, FileEntry]

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.size for entry in self.files.values())

    def to_json(self) -> str:
        """The manifest's text."""
        document = asdict(self) | {"format": FORMAT, "layout": self.layout.to_json()}
        return json.dumps(document, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parses `to_json`'s text.

        Raises:
            CorruptCheckpoint: it is no manifest.
            UnsupportedCheckpoint: it is of a format that this release does not know.
        """
        try:
            document: dict[str, Any] = json.loads(text)
            version = document.pop("format")
            if isinstance(version, int) and version != FORMAT:
                raise UnsupportedCheckpoint(
                    f"its manifest has format {version}, and this release reads {FORMAT} only"
                )
            if unknown := document.keys() - cls.__slots__:
                raise UnsupportedCheckpoint(f"its manifest has the unknown field {min(unknown)}")
            files = {
                name: FileEntry(size=int(entry["size"]), sha256=str(entry["sha256"]))
                for name, entry in document.pop("files").items()
            }
            layout = Layout.from_json(document.pop("layout"))
            return cls(files=files, layout=layout, **document)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpoint(f"{NAME} does not parse: {error!r}") from error


def model_digest(config: Mapping[str, Any]) -> str:
    """Tells models apart: SHA-256 (hex) of a Hugging Face config, however it was written."""
    text = json.dumps(config, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def describe_files(folder: Path, names: Iterable[str] | None = None) -> dict[str, FileEntry]:
    """Size and hash of the named files of a folder; None means every file but the manifest."""
    names = file_names(folder) if names is None else sorted(names)
    # hashlib lets go of the GIL, so threads read and hash in parallel.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: _describe(folder / name), names), strict=True))


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint, without a look at the other files.

    Raises:
        CorruptCheckpoint: there is none, or it does not parse.
        UnsupportedCheckpoint: it is of a format that this release does not know.
    """
    try:
        text = (folder / NAME).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{folder.name} has no {NAME}") from error
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"{folder.name}/{NAME} is not text") from error
    try:
        return Manifest.from_json(text)
    except UnsupportedCheckpoint as error:
        raise UnsupportedCheckpoint(
            f"the checkpoint {folder} was written by another release: {error}. Go on with that "
            "release; nothing was changed"
        ) from None


def verify(folder: Path) -> Manifest:
    """The manifest, once every file has the size and the hash that it names.

    Raises:
        CorruptCheckpoint: says which file is wrong.
        UnsupportedCheckpoint: another release wrote it; the files were not looked at.
        OSError: the storage could not be read, which says nothing about the checkpoint.
    """
    manifest = read(folder)
    verify_sizes(folder, manifest)
    found = describe_files(folder, manifest.files)
    for name, entry in manifest.files.items():
        if found[name] != entry:
            raise CorruptCheckpoint(f"{folder.name}/{name} does not have its manifest's SHA-256")
    return manifest


def verify_sizes(folder: Path, manifest: Manifest) -> None:
    """Compares names and sizes of files with a manifest, which needs no reading.

    Raises:
        CorruptCheckpoint: says which file is wrong.
    """
    missing = manifest.files.keys() - set(file_names(folder))
    if missing:
        raise CorruptCheckpoint(f"{folder.name} lacks {min(missing)}")
    for name, entry in manifest.files.items():
        size = (folder / name).stat().st_size
        if size != entry.size:
            raise CorruptCheckpoint(
                f"{folder.name}/{name} has {size} bytes, its manifest says {entry.size}"
            )


def file_names(folder: Path) -> list[str]:
    """Every file of a folder but the manifest, with / between the parts of its path."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path != folder / NAME
    )


def _describe(path: Path) -> FileEntry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(size=file.tell(), sha256=digest)
