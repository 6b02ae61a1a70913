"""What a docker-archive holds, layer by layer: a file that a later layer removes is still in it."""

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Image:
    """An image in an archive.

    Attributes:
        config: its configuration, with the history of its making.
        files: of all layers above the base, without folders.
    """

    config: dict[str, Any]
    files: tuple[tarfile.TarInfo, ...]


def read(archive: Path, base: Path) -> Image:
    """The image of an archive without the layers of its base's archive."""
    with tarfile.open(base) as held:
        known = set(_config(held)["rootfs"]["diff_ids"])
    with tarfile.open(archive) as held:
        config = _config(held)
        layers = _manifest(held)["Layers"]
        digests = config["rootfs"]["diff_ids"]
        own = [layer for layer, digest in zip(layers, digests, strict=True) if digest not in known]
        assert 0 < len(own) < len(layers), "the base's layers are not those of the image"
        files = tuple(file for layer in own for file in _files(held, layer))
    return Image(config, files)


def _files(archive: tarfile.TarFile, layer: str) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=archive.extractfile(layer)) as held:
        return [member for member in held if not member.isdir()]


def _manifest(archive: tarfile.TarFile) -> Any:
    (manifest,) = _json(archive, "manifest.json")
    return manifest


def _config(archive: tarfile.TarFile) -> Any:
    return _json(archive, _manifest(archive)["Config"])


def _json(archive: tarfile.TarFile, name: str) -> Any:
    content = archive.extractfile(name)
    assert content is not None
    return json.load(content)
