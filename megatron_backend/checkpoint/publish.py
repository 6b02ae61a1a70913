"""How a checkpoint becomes visible: whole, verified, on disk, or not at all.

`kill -9` may come at any line, and the machine may lose power. The order of the steps is what keeps
the promise that `latest` always names a complete checkpoint:

1. ranks write into `.tmp-STEP-ATTEMPT-RANDOM`, a name that nobody looks at; each file is hashed
   while it is written, and fsynced;
2. `manifest.json` with sizes and hashes is written last and fsynced, and so are the folders;
3. names and sizes on disk are compared with the manifest;
4. under the fence's lock (see `service.spec.fence`): one rename to `step-XXXXXXXX`, fsync of the
   folder, then `latest` is replaced, and only then older checkpoints lose their names;
5. what lost its name is deleted.

Nothing with the name `step-XXXXXXXX` is ever written to or half deleted. Leftovers of the other
names are swept when the next attempt starts. A checkpoint that does not verify (a disk that lies)
is set aside as `.corrupt-...`, so that nobody else picks it, and the one before it is used; the
newest two of those stay as evidence. One that is whole but of another release, job or model is an
error, and keeps its name.

A step that is saved again replaces the old one by two renames. A crash between them leaves the old
one, whole, under `.replaced-...`, and the next start gives it its name back.
"""

import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from megatron_backend.checkpoint import manifest as manifests
from megatron_backend.checkpoint.durable import move
from megatron_backend.checkpoint.fence import Fence
from megatron_backend.checkpoint.hashed_file import FileEntry
from megatron_backend.checkpoint.manifest import (
    CorruptCheckpoint,
    ForeignCheckpoint,
    Manifest,
    UnsupportedCheckpoint,
)
from megatron_backend.checkpoint.retention import Retention
from service.spec.attempt import step_name, step_of
from service.spec.durable import fsync_file, fsync_folders, replace_text, write_text
from service.spec.layout import Layout

CORRUPT_KEPT = 2
"""How many damaged checkpoints stay as evidence."""
_REPLACED = re.compile(r"\.replaced-(.+)-[0-9a-f]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A checkpoint that can be loaded."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose checkpoints a store holds; others are refused.

    Attributes:
        job: its id.
        model: `model_digest` of its model's config.
    """

    job: str
    model: str


class CheckpointStore:
    """The published checkpoints of one job, as one attempt of it sees them."""

    def __init__(self, job_dir: Path, fence: Fence, owner: Owner) -> None:
        self.root = job_dir / "checkpoints"
        self._fence, self._owner = fence, owner

    def open(self) -> None:
        """Sweeps what dead attempts left behind. Call once, after the fence is taken.

        Raises:
            StaleAttempt: this attempt is no longer the newest.
        """
        self.root.mkdir(exist_ok=True)
        with self._fence.held():
            for path in sorted(self.root.iterdir()):
                replaced = _REPLACED.fullmatch(path.name)
                if replaced is None or step_of(replaced[1]) is None:
                    continue
                if not (self.root / replaced[1]).exists():
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
        self,
        staged: Path,
        *,
        step: int,
        layout: Layout,
        files: Mapping[str, FileEntry],
        retention: Retention,
        score: float | None = None,
    ) -> Published:
        """Makes a staged folder the newest checkpoint, then lets go of old ones.

        Args:
            staged: from `stage`, with every rank's files on disk.
            step: steps done.
            layout: of the ranks that wrote.
            files: size and hash of files that are known, and on disk, already; those of the others
                are found out here.
            retention: which checkpoints stay.
            score: see `Manifest`.

        Raises:
            StaleAttempt: a newer attempt has taken over; nothing was published.
            CorruptCheckpoint: what is on disk is not what was written; nothing was published.
        """
        own = set(manifests.file_names(staged)) - files.keys()
        for name in own:
            fsync_file(staged / name)
        manifest = Manifest(
            job=self._owner.job,
            model=self._owner.model,
            step=step,
            attempt=self._fence.attempt,
            layout=layout,
            score=score,
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            files={**manifests.describe_files(staged, own), **files},
        )
        write_text(staged / manifests.NAME, manifest.to_json())
        fsync_folders(staged)
        if manifests.read(staged) != manifest:
            raise CorruptCheckpoint(f"the manifest of step {step} reads back differently")
        manifests.verify_sizes(staged, manifest)
        return self.admit(staged, manifest, retention)

    def admit(self, staged: Path, manifest: Manifest, retention: Retention) -> Published:
        """Gives a staged folder that is whole and on disk its name; see `publish`."""
        target = self.root / step_name(manifest.step)
        with self._fence.held():
            nameless = self._rename(staged, target)
            replace_text(self.root / "latest", f"{target.name}\n")
            nameless += self._retire(retention, newest=manifest.step)
        for path in nameless:
            _delete(path)
        return Published(path=target, manifest=manifest)

    def discard(self, staged: Path) -> None:
        """Throws a staged folder away, after a save that failed."""
        _delete(staged)

    def steps(self) -> list[int]:
        """Steps that have a published folder, rising."""
        steps = (step_of(path.name) for path in self.root.iterdir())
        return sorted(step for step in steps if step is not None)

    def newest(self, warn: Callable[[str], None]) -> Published | None:
        """The newest checkpoint that verifies, with `latest` set to it; None where there is none.

        One that does not verify is set aside, and `warn` is told.

        Raises:
            StaleAttempt: this attempt is no longer the newest.
            RefusedCheckpoint: the newest is of another release, job or model; it was left alone.
            OSError: the storage could not be read, which says nothing about the checkpoints.
        """
        for step in reversed(self.steps()):
            folder = self.root / step_name(step)
            try:
                manifest = self.verify(folder)
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

    def verify(self, folder: Path, *, job: str | None = None) -> Manifest:
        """The manifest of a checkpoint that this job can go on from.

        Args:
            folder: a published checkpoint, in whichever job's folder.
            job: whose it must be; None means this store's own.

        Raises:
            CorruptCheckpoint: a file is not what the manifest says.
            RefusedCheckpoint: it is of another release, job or model.
            OSError: the storage could not be read.
        """
        manifest = manifests.read(folder)
        owner = job or self._owner.job
        if manifest.job != owner:
            raise ForeignCheckpoint(
                f"the checkpoint {folder} is of the job {manifest.job}, and this is {owner}: move "
                "it out of the folder, or name that job in `resume`; nothing was changed"
            )
        if manifest.model != self._owner.model:
            raise ForeignCheckpoint(
                f"the checkpoint {folder} is of another model than the job's: its config differs. "
                "Move it out of the folder; nothing was changed"
            )
        return manifests.verify(folder)

    def _rename(self, staged: Path, target: Path) -> list[Path]:
        if not target.exists():
            move(staged, target)
            return []
        replaced = self.root / f".replaced-{target.name}-{secrets.token_hex(4)}"
        move(target, replaced)
        move(staged, target)
        return [replaced]

    def _retire(self, retention: Retention, *, newest: int) -> list[Path]:
        nameless = []
        scores = self._scores(newest)
        for step in scores.keys() - retention.kept(scores):
            trash = self.root / f".trash-{step_name(step)}-{secrets.token_hex(4)}"
            # On disk before anything in it is deleted: after a power cut it must not be back, torn.
            move(self.root / step_name(step), trash)
            nameless.append(trash)
        damaged = sorted(
            self.root.glob(".corrupt-*"), key=lambda path: int(path.name.split("-")[3])
        )
        return nameless + damaged[:-CORRUPT_KEPT]

    def _scores(self, newest: int) -> dict[int, float | None]:
        """By step, as the manifests have it; so the best is known after a resume, too."""
        scores: dict[int, float | None] = {}
        for step in self.steps():
            try:
                if step <= newest:
                    scores[step] = manifests.read(self.root / step_name(step)).score
            except CorruptCheckpoint:
                scores[step] = None
            except UnsupportedCheckpoint:
                continue  # another release's: not ours to delete
        return scores

    def _set_aside(self, folder: Path) -> None:
        with self._fence.held():
            aside = f".corrupt-{folder.name}-{time.time_ns()}-{secrets.token_hex(4)}"
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
