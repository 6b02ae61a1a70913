"""What an attempt's folder says about its life in Kubernetes, where objects come and go.

    attempts/N/
      shut-out       the attempt may not start any more; made by `cancel` before it deletes
      head           uid of the pod whose driver it is; made by the RayJob's command, once
      oom            the kernel killed the driver for want of memory; made by that command
      ending         the head's pod is being ended; made by its preStop hook
      kuberay.json   how it ended, as it was first seen; nothing that comes later changes it

A RayJob that was deleted leaves nothing behind, so a second `submit` would bring it back to life
without `shut-out`. A RayJob whose head was lost gets a new head and runs its command again; `head`
tells the two lives apart. And an end that was seen stays seen when the RayJob is gone.
"""

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.launchers.protocol import Observation, Phase
from service.spec import Reason
from service.spec.durable import fsync_file, write_text

SHUT_OUT = "shut-out"
HEAD = "head"
OUT_OF_MEMORY = "oom"
ENDING = "ending"
VERDICT = "kuberay.json"


@dataclass(frozen=True, slots=True)
class Record:
    """An attempt's folder, as this launcher uses it."""

    path: Path

    @property
    def is_shut_out(self) -> bool:
        return (self.path / SHUT_OUT).exists()

    @property
    def ran_out_of_memory(self) -> bool:
        return (self.path / OUT_OF_MEMORY).exists()

    def head(self) -> str | None:
        """The uid of the driver's pod; null where no driver was started."""
        try:
            return (self.path / HEAD).read_text(encoding="ascii").strip() or None
        except FileNotFoundError:
            return None

    def shut_out(self) -> None:
        """Sees to it that the attempt never starts again; on disk when it returns."""
        self._make(SHUT_OUT, "")

    def verdict(self) -> Observation | None:
        """How it ended, without what may be left of it; null where no end was seen."""
        try:
            found: dict[str, Any] = json.loads((self.path / VERDICT).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        reason = found["reason"]
        return Observation(
            phase=Phase.EXITED,
            exit_code=found["exit_code"],
            exit_signal=found["exit_signal"],
            reason=None if reason is None else Reason(reason),
            evidence=found["evidence"],
        )

    def keep_verdict(self, seen: Observation) -> Observation:
        """Keeps the first end that is seen; returns the one that is kept."""
        fields = {
            "exit_code": seen.exit_code,
            "exit_signal": seen.exit_signal,
            "reason": seen.reason,
            "evidence": seen.evidence,
        }
        self._make(VERDICT, json.dumps(fields, indent=2) + "\n")
        kept = self.verdict()
        assert kept is not None
        return kept

    def _make(self, name: str, text: str) -> None:
        """Makes a file, whole, where there is none of that name yet."""
        if (self.path / name).exists():
            return
        self.path.mkdir(parents=True, exist_ok=True)
        fresh = self.path / f".{name}-{secrets.token_hex(8)}"
        write_text(fresh, text)
        try:
            os.link(fresh, self.path / name)
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
        fsync_file(self.path)
