"""What a job's workers published on disk: checkpoints and exports. Read only.

The folders are the truth about what can be loaded; the events only say what was published once.
Workers publish each by one rename, and write a checkpoint's manifest before it, so whatever has its
final name is whole. A folder may lose its name while it is read here (retention): it is skipped.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from service.spec.attempt import step_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCheckpoint:
    """A checkpoint that can be loaded."""

    step: int
    attempt: int
    layout: Mapping[str, Any]
    """Of the ranks that wrote it; any layout can load it."""
    created_at: float
    """Seconds since the epoch."""
    bytes: int
    path: Path
    latest: bool
    """It is the one that the next attempt goes on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Hugging Face weights of one step."""

    step: int
    path: Path


def checkpoint_folders(root: Path) -> dict[int, Path]:
    """The published checkpoints below `root`, by step, rising."""
    return {s: p for s, p in _step_folders(root).items() if (p / "manifest.json").is_file()}


def latest_step(root: Path) -> int | None:
    """The step that `latest` names; None where it names no published checkpoint."""
    try:
        name = (root / "latest").read_text(encoding="utf-8").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    step = step_of(name)
    return step if step is not None and (root / name / "manifest.json").is_file() else None


def checkpoints(root: Path) -> list[PublishedCheckpoint]:
    """The published checkpoints of a job, by step, rising."""
    latest = latest_step(root)
    found = []
    for step, path in checkpoint_folders(root).items():
        try:
            manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        found.append(
            PublishedCheckpoint(
                step=step,
                attempt=manifest["attempt"],
                layout=manifest["layout"],
                created_at=datetime.fromisoformat(manifest["created_at"]).timestamp(),
                bytes=sum(entry["size"] for entry in manifest["files"].values()),
                path=path,
                latest=step == latest,
            )
        )
    return found


def newest_export(root: Path) -> Export | None:
    """The export of the highest step; None where there is none."""
    found = _step_folders(root)
    return Export(step=max(found), path=found[max(found)]) if found else None


def _step_folders(root: Path) -> dict[int, Path]:
    if not root.is_dir():
        return {}
    found = {
        step: entry
        for entry in root.iterdir()
        if (step := step_of(entry.name)) is not None and entry.is_dir() and not entry.is_symlink()
    }
    return dict(sorted(found.items()))
