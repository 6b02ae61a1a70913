"""Checks an uploaded file; Parquet, which native code reads, in a process of its own.

A file that makes the reader crash, or take all memory, ends that process and not the service.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from pydantic import TypeAdapter

from service.files.rows import Report, check_rows
from service.spec.rows import parquet
from service.validation.problems import FieldProblem

_REPORT = TypeAdapter(Report)


def check_upload(path: Path, *, max_row_bytes: int, timeout_seconds: float) -> Report:
    """As `check_rows`.

    Args:
        path: the file.
        max_row_bytes: longest row of JSON that is accepted.
        timeout_seconds: how long reading Parquet may take.
    """
    with path.open("rb") as file:
        first = file.read(len(parquet.MAGIC))
    if first != parquet.MAGIC:
        return check_rows(path, max_row_bytes=max_row_bytes)
    # Whatever else the service was told in variables is not for what reads strangers' files.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PLANISH_")}
    command = [sys.executable, "-m", "service.files.isolated", str(path), str(max_row_bytes)]
    try:
        done = subprocess.run(
            command, capture_output=True, env=kept, timeout=timeout_seconds, check=True
        )
    except subprocess.TimeoutExpired:
        return _refused(f"reading it takes more than {timeout_seconds:g} s")
    except subprocess.CalledProcessError as error:
        return _refused(f"its reader ended with {error.returncode}")
    return _REPORT.validate_json(done.stdout)


def _refused(why: str) -> Report:
    problem = FieldProblem(
        field="file", message=f"the Parquet file cannot be read: {why}", fix="write it again"
    )
    return Report(problems=[problem])


def main(path: str, max_row_bytes: str) -> None:
    """Writes a report as JSON."""
    report = check_rows(Path(path), max_row_bytes=int(max_row_bytes))
    sys.stdout.write(json.dumps(_REPORT.dump_python(report, mode="json")))


if __name__ == "__main__":
    main(*sys.argv[1:])
