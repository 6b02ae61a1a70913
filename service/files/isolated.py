"""Checks a file of rows; Parquet, which native code reads, in a process of its own.

A file that makes the reader crash, or take all memory, ends that process and not the service.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal, cast

from pydantic import TypeAdapter

from service.files.rows import Report, check_rows, first_format
from service.spec.algorithm import RowKind
from service.spec.rows import FileFault, RowFault, parquet
from service.spec.rows.kinds import check_format
from service.validation.problems import FieldProblem

_REPORT = TypeAdapter(Report)


def check_upload(path: Path, *, max_row_bytes: int, timeout_seconds: float) -> Report:
    """As `check_rows`.

    Args:
        path: the file.
        max_row_bytes: longest row of JSON that is accepted.
        timeout_seconds: how long reading Parquet may take.
    """
    if not _is_parquet(path):
        return check_rows(path, max_row_bytes=max_row_bytes)
    try:
        return _REPORT.validate_json(_run(timeout_seconds, "rows", path, max_row_bytes))
    except FileFault as fault:
        problem = FieldProblem(field="file", message=str(fault), fix="write it again")
        return Report(problems=[problem])


def check_first_row(path: Path, rows: RowKind, *, timeout_seconds: float) -> None:
    """Whether a file's first row is of the right kind.

    Args:
        path: the file.
        rows: what an algorithm trains on.
        timeout_seconds: how long reading Parquet may take.

    Raises:
        RowFault: it is of another kind, or of no format that is known.
        FileFault: the file holds no rows, or its reader failed.
        OSError: it cannot be read.
    """
    if not _is_parquet(path):
        check_format(first_format(path), rows)
        return
    said = json.loads(_run(timeout_seconds, "first", path, rows))
    if said is not None:
        raise RowFault(*said) if len(said) == 2 else FileFault(*said)


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(parquet.MAGIC)) == parquet.MAGIC


def _run(timeout_seconds: float, *arguments: object) -> bytes:
    # Whatever else the service was told in variables is not for what reads strangers' files.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PLANISH_")}
    command = [sys.executable, "-m", "service.files.isolated", *map(str, arguments)]
    try:
        done = subprocess.run(
            command, capture_output=True, env=kept, timeout=timeout_seconds, check=True
        )
    except subprocess.TimeoutExpired as error:
        why = f"reading it takes more than {timeout_seconds:g} s"
        raise FileFault(f"the Parquet file cannot be read: {why}") from error
    except subprocess.CalledProcessError as error:
        why = f"its reader ended with {error.returncode}"
        raise FileFault(f"the Parquet file cannot be read: {why}") from error
    return done.stdout


def main(what: Literal["rows", "first"], path: str, argument: str) -> None:
    """Writes as JSON a report of all rows, or what is wrong with the first one (null: nothing)."""
    if what == "rows":
        report = check_rows(Path(path), max_row_bytes=int(argument))
        sys.stdout.write(json.dumps(_REPORT.dump_python(report, mode="json")))
        return
    wrong: list[str | None] | None = None
    try:
        check_format(first_format(Path(path)), cast("RowKind", argument))
    except RowFault as fault:
        wrong = [fault.message, fault.fix]
    except (FileFault, OSError) as fault:
        wrong = [str(fault)]
    sys.stdout.write(json.dumps(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
