"""`--log`: a driver's output goes to the end of its attempt's log, whoever writes it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.megatron_backend.driver import tiny_job

SCRIPT = """
import os, subprocess, sys
from pathlib import Path
from megatron_backend.driver.output import redirect_output
print("before")
redirect_output(Path(sys.argv[1]))
print("python")
print("error", file=sys.stderr)
sys.stdout.flush()
os.write(1, b"native\\n")
subprocess.run(["sh", "-c", "echo child; echo child error >&2"], check=True)
"""


def test_everything_goes_to_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "attempts" / "1" / "log"
    log.parent.mkdir(parents=True)
    log.write_text("of the batch script\n")
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(log)],
        env=os.environ | {"PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (run.stdout, run.stderr) == ("before\n", "")
    lines = log.read_text().splitlines()
    assert lines[0] == "of the batch script"
    assert sorted(lines[1:]) == ["child", "child error", "error", "native", "python"]


def test_a_driver_with_log(tmp_path: Path) -> None:
    code, output = tiny_job.run_command([str(tmp_path), "--attempt", "3", "--log"], cwd=tmp_path)
    assert (code, output) == (1, "")
    assert "context.json is not there" in tiny_job.log_text(tmp_path, 3)


def test_a_log_that_cannot_be_written_is_told_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "attempts").write_text("a file")
    code, output = tiny_job.run_command([str(tmp_path), "--log"], cwd=tmp_path)
    assert code == 64
    assert "the attempt's log cannot be written" in output
