"""How a checkpoint becomes visible: whole, verified, on disk, or not at all.

`kill -9` may come at any line, and the machine may lose power. The order of the steps is what keeps
the promise that `latest` always names a complete checkpoint:

1. ranks write into `.tmp-STEP-ATTEMPT-RANDOM`, a name that nobody looks at;
2. every file is fsynced; `manifest.json` with sizes and hashes is written last and fsynced;
3. what is on disk is verified against the manifest;
4. under the fence's lock (see `fence`): one rename to `step-XXXXXXXX`, fsync of the folder, then
   `latest` is replaced, and only then older checkpoints lose their names;
5. what lost its name is deleted.

Nothing with the name `step-XXXXXXXX` is ever written to or half deleted. Leftovers of the other
names are swept when the next attempt starts. A checkpoint that does not verify (a disk that lies)
is set aside as `.corrupt-...`, so that nobody else picks it, and the one before it is used.

A step that is saved again replaces the old one by two renames. A crash between them leaves the old
one, whole, under `.replaced-...`, and the next start gives it its name back.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from megatron_backend.checkpoint import manifest as manifests
from megatron_backend.checkpoint.durable import (
    fsync_file,
    fsync_tree,
    move,
    replace_text,
    write_text,
)
from megatron_backend.checkpoint.fence import Fence
from megatron_backend.checkpoint.manifest import CorruptCheckpoint, Manifest

_STEP = re.compile(r"step-(\d{8,9})")
_REPLACED = re.compile(r"\.replaced-(step-\d{8,9})-[0-9a-f]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A checkpoint that can be loaded."""

    path: Path
    manifest: Manifest


def step_name(step: int) -> str:
    """Name of a step's folder."""
    return f"step-{step:08d}"


class CheckpointStore:
    """The published checkpoints of one job, as one attempt of it sees them."""

    def __init__(self, job_dir: Path, fence: Fence) -> None:
        self.root = job_dir / "checkpoints"
        self._fence = fence

    def open(self) -> None:
        """Sweeps what dead attempts left behind. Call once, after the fence is taken.

        Raises:
            StaleAttempt: this attempt is no longer the newest.
        """
        self.root.mkdir(exist_ok=True)
        with self._fence.held():
            for path in sorted(self.root.iterdir()):
                replaced = _REPLACED.fullmatch(path.name)
                if replaced and not (self.root / replaced[1]).exists():
                    move(path, self.root / replaced[1])
            for path in self.root.iterdir():
                if path.name.startswith((".tmp-", ".trash-", ".replaced-", ".latest-")):
                    _delete(path)

    def stage(self, step: int) -> Path:
        """A fresh folder for the ranks to write a checkpoint into."""
        random = secrets.token_hex(4)
        folder = self.root / f".tmp-{step:08d}-{self._fence.attempt}-{random}"
        folder.mkdir()
        return folder

    def publish(
        self, staged: Path, *, step: int, layout: Mapping[str, int], keep_last: int
    ) -> Published:
        """Makes a staged folder the newest checkpoint, then lets go of old ones.

        Args:
            staged: from `stage`, with every rank's files closed.
            step: steps done.
            layout: tp, pp and dp of the ranks that wrote.
            keep_last: how many checkpoints stay, the new one included; at least 1.

        Raises:
            StaleAttempt: a newer attempt has taken over; nothing was published.
            CorruptCheckpoint: what is on disk is not what was written; nothing was published.
        """
        fsync_tree(staged)
        manifest = Manifest(
            step=step,
            attempt=self._fence.attempt,
            layout=dict(layout),
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            files=manifests.describe_files(staged),
        )
        write_text(staged / manifests.NAME, manifest.to_json())
        fsync_file(staged)
        if manifests.verify(staged) != manifest:
            raise CorruptCheckpoint(f"the manifest of step {step} reads back differently")
        target = self.root / step_name(step)
        with self._fence.held():
            nameless = self._rename(staged, target)
            replace_text(self.root / "latest", f"{target.name}\n")
            nameless += self._retire(keep_last, newest=step)
        for path in nameless:
            _delete(path)
        return Published(path=target, manifest=manifest)

    def discard(self, staged: Path) -> None:
        """Throws a staged folder away, after a save that failed."""
        _delete(staged)

    def steps(self) -> list[int]:
        """Steps that have a published folder, rising."""
        matches = (_STEP.fullmatch(path.name) for path in self.root.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def newest(self, warn: Callable[[str], None]) -> Published | None:
        """The newest checkpoint that verifies, with `latest` set to it; None where there is none.

        One that does not verify is set aside, and `warn` is told.

        Raises:
            StaleAttempt: this attempt is no longer the newest.
            OSError: the storage could not be read, which says nothing about the checkpoints.
        """
        for step in reversed(self.steps()):
            folder = self.root / step_name(step)
            try:
                manifest = manifests.verify(folder)
            except CorruptCheckpoint as error:
                self._set_aside(folder)
                warn(f"checkpoint {folder.name} is damaged and was set aside: {error}")
                continue
            if self._latest() != folder.name:  # a crash came between the rename and `latest`
                with self._fence.held():
                    replace_text(self.root / "latest", f"{folder.name}\n")
            return Published(path=folder, manifest=manifest)
        with self._fence.held():
            (self.root / "latest").unlink(missing_ok=True)
        return None

    def _rename(self, staged: Path, target: Path) -> list[Path]:
        if not target.exists():
            move(staged, target)
            return []
        replaced = self.root / f".replaced-{target.name}-{secrets.token_hex(4)}"
        move(target, replaced)
        move(staged, target)
        return [replaced]

    def _retire(self, keep_last: int, *, newest: int) -> list[Path]:
        nameless = []
        kept = [step for step in self.steps() if step <= newest][-keep_last:]
        for step in self.steps():
            if step < kept[0]:
                trash = self.root / f".trash-{step_name(step)}-{secrets.token_hex(4)}"
                os.rename(self.root / step_name(step), trash)
                nameless.append(trash)
        # Set aside before a newer one existed; nobody needs the evidence any more.
        nameless += self.root.glob(".corrupt-*")
        return nameless

    def _set_aside(self, folder: Path) -> None:
        with self._fence.held():
            aside = f".corrupt-{folder.name}-{int(time.time())}-{secrets.token_hex(4)}"
            move(folder, self.root / aside)

    def _latest(self) -> str | None:
        try:
            return (self.root / "latest").read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        # Another attempt's sweep may be at the same folder.
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
