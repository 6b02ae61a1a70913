"""`python -m megatron_backend JOB_DIR [--attempt N] [--log]`: runs one attempt of a job.

Exit code 0 where it succeeded, 1 where it failed (outcome.json says why), 2 where a newer attempt
has taken over or another process is at this one, 64 where the command itself is wrong.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import NoReturn

from megatron_backend.driver.output import redirect_output

EX_USAGE = 64


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EX_USAGE, f"{self.prog}: {message}\n")


def main() -> int:
    """Parses the command line and runs the attempt."""
    parser = _Parser(prog="python -m megatron_backend", description="Runs one attempt of a job.")
    parser.add_argument("job_dir", type=Path, metavar="JOB_DIR", help="the job's folder")
    parser.add_argument("--attempt", type=int, default=1, metavar="N", help="its number, from 1")
    parser.add_argument(
        "--log", action="store_true", help="write all output to the attempt's log, at its end"
    )
    arguments = parser.parse_args()
    if not arguments.job_dir.is_dir():
        parser.error(f"{arguments.job_dir} is no folder")
    if arguments.attempt < 1:
        parser.error(f"attempts are numbered from 1, not {arguments.attempt}")
    folder = arguments.job_dir.resolve()
    if arguments.log:
        from service.spec.attempt import attempt_path

        try:
            redirect_output(attempt_path(folder, arguments.attempt) / "log")
        except OSError as error:
            parser.error(f"the attempt's log cannot be written: {error}")
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line for each push
    from megatron_backend.driver.run import run_attempt

    return run_attempt(folder, arguments.attempt)


if __name__ == "__main__":
    sys.exit(main())
