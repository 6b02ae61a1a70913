"""A job's folder on disk; its layout is part of the contract (`service.spec.attempt`).

Every file is written beside its place, synced and renamed, so a reader sees the old or the new one
and never half of it. Each write can be repeated: the reconciler may be killed after any of them and
does them all again.
"""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from service.spec import JobContext, Outcome, Reason
from service.spec.attempt import attempt_path
from service.spec.durable import fsync_file, replace_text, write_text
from service.spec.fence import raise_fence, read_fence


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """JOB_DIR/attempts/N."""

    path: Path

    @property
    def token_path(self) -> Path:
        return self.path / "token"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def log_path(self) -> Path:
        return self.path / "log"

    @property
    def outcome_path(self) -> Path:
        return self.path / "outcome.json"

    def make_token(self) -> str:
        """The attempt's secret: the one on disk, or a new one (mode 0600) where there is none."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.token_path.exists():
            fresh = self.path / f".token-{secrets.token_hex(8)}"
            write_text(fresh, secrets.token_urlsafe(32), mode=0o600)
            try:
                os.link(fresh, self.token_path)  # fails where another reconciler was first
            except FileExistsError:
                pass
            finally:
                fresh.unlink()
            fsync_file(self.path)
        return self.token_path.read_text(encoding="utf-8")

    def write_stop(self, reason: Reason) -> None:
        """Tells the driver why it is about to be asked to end; the first reason stays."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / "stop").exists():
            replace_text(self.path / "stop", f"{reason}\n")

    def outcome(self) -> Outcome | None:
        """What the driver said as its last act; null where it said nothing.

        Raises:
            ValueError: the file is there and is no Outcome.
        """
        try:
            # NFS may remember for a minute that a name was not there; whoever opens the folder asks
            # the server anew.
            os.listdir(self.path)
            text = self.outcome_path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return Outcome.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(f"{self.outcome_path} is no outcome: {error}") from error


@dataclass(frozen=True, slots=True)
class JobFolder:
    """JOB_DIR."""

    path: Path

    def attempt(self, number: int) -> AttemptFolder:
        """The folder of one attempt; it need not exist."""
        return AttemptFolder(attempt_path(self.path, number))

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def exports_path(self) -> Path:
        return self.path / "exports"

    def write_context(self, context: JobContext) -> None:
        """Writes context.json, all that a driver needs to know."""
        self.path.mkdir(parents=True, exist_ok=True)
        replace_text(self.path / "context.json", context.model_dump_json(indent=2) + "\n")

    def write_endpoint(self, base_url: str) -> None:
        """Writes the address under which workers reach the service."""
        self.path.mkdir(parents=True, exist_ok=True)
        replace_text(self.path / "endpoint", base_url + "\n")

    def fence(self) -> int:
        """Number of the newest attempt; 0 before the first."""
        return read_fence(self.path)

    def raise_fence(self, attempt: int) -> None:
        """Shuts out every attempt older than `attempt`. A fence never goes down.

        Raises:
            TimeoutError: a driver holds the lock and does not let go.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        raise_fence(self.path, attempt)
