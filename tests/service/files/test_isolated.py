"""Parquet is read in a process of its own, whose end is no end of the service."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from service.files.isolated import check_first_row, check_upload
from service.spec.rows import FileFault, RowFault
from tests.service.spec.rows.parquet_files import write_parquet

GOOD = {"prompt": "a", "completion": "b"}


def _check(path: Path, timeout_seconds: float = 120.0) -> list[tuple[str, str]]:
    report = check_upload(path, max_row_bytes=1000, timeout_seconds=timeout_seconds)
    return [(problem.field, problem.message) for problem in report.problems]


def test_its_report_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    write_parquet(path, [GOOD, {"prompt": "a"}, GOOD])
    report = check_upload(path, max_row_bytes=1000, timeout_seconds=120)
    assert (report.rows, report.bad_rows) == (2, 1)
    assert report.problems[0].field == "row 2"
    assert "`prompt`" in report.problems[0].message


def test_rubbish_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(b"PAR1" + b"rubbish" * 9)
    ((field, message),) = _check(tmp_path / "rows")
    assert field == "row 1"
    assert "the Parquet file cannot be read on" in message


def test_a_reader_that_crashes_or_hangs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader is replaced by a process that ends as one in native code would."""
    (tmp_path / "rows").write_bytes(b"PAR1")
    run = subprocess.run

    def crash(_: list[str], **options: object) -> object:
        code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
        return run([sys.executable, "-c", code], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", crash)
    ((_, message),) = _check(tmp_path / "rows")
    assert f"its reader ended with -{signal.SIGSEGV:d}" in message

    def hang(_: list[str], **options: object) -> object:
        return run([sys.executable, "-c", "import time; time.sleep(600)"], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", hang)
    assert "takes more than 0.2 s" in _check(tmp_path / "rows", timeout_seconds=0.2)[0][1]


def test_a_first_row_is_compared_there_too(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    write_parquet(path, [GOOD])
    check_first_row(path, "conversation", timeout_seconds=120)
    with pytest.raises(RowFault, match="pair"):
        check_first_row(path, "preference", timeout_seconds=120)
    path.write_bytes(b"PAR1" + b"rubbish" * 9)
    with pytest.raises((RowFault, FileFault), match="cannot be read"):
        check_first_row(path, "conversation", timeout_seconds=120)


def test_json_needs_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pytest.fail)
    (tmp_path / "rows").write_text('{"prompt": "a", "completion": "b"}\n')
    assert _check(tmp_path / "rows") == []
