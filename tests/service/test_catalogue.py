"""The environments' own process: which files it may read, and what is remembered of its answers."""

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from service import catalogue as module
from service.catalogue import Catalogue, CatalogueUnavailable

ROW = json.dumps({"question": "How many?", "answer": "#### 2"})


def test_questions_are_read_from_the_data_roots_only_and_a_refusal_is_not_remembered(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    catalogue = Catalogue(timeout_seconds=120, data_roots=[root])

    def problems(path: str) -> list[str]:
        version, faults = catalogue.check(
            id="math/gsm8k", version=None, max_turns=None, config={"path": path}
        )
        assert (version is None) == bool(faults)
        return [fault.message for fault in faults]

    outside = tmp_path / "outside.jsonl"
    outside.write_text(ROW)
    missing = f"no file at this path under the data roots ({root})"
    assert problems(str(outside)) == [missing]
    assert problems("rows.jsonl") == [missing]
    (root / "rows.jsonl").write_text(ROW)
    assert problems("rows.jsonl") == []


def test_a_machine_that_starts_no_process_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    catalogue = Catalogue(timeout_seconds=120)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_spawn", refuse)
        with pytest.raises(CatalogueUnavailable, match=r"cannot be started: .*no more processes"):
            catalogue.environments()
    assert "math/gsm8k" in catalogue.environments()


def test_a_process_that_starts_while_the_service_ends_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    catalogue = Catalogue(timeout_seconds=120)

    def start(*_args: Any) -> subprocess.Popen[str]:
        catalogue.close()
        return subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    monkeypatch.setattr(module, "_spawn", start)
    with pytest.raises(CatalogueUnavailable, match="ended with -9"):
        catalogue.environments()
