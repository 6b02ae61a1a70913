"""What a program that imports no torch asks about a file of rows, as JSON over standard streams.

    python -m algorithms.data check FILE [--tokenizer DIR] [--algorithm TYPE] [--max-length N]
                                         [--too-long RULE] [--strings chat|plain]

Standard output has lines of {"progress": {rows, bytes, total}} and at last {"report": ...}, see
`algorithms.data.check.Report`. Exit code 0: every row can be trained on; 1: rows are rejected; 2:
the file or the tokenizer cannot be used, told on standard error.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TextIO, get_args

from algorithms.data.chat import ChatFormat
from algorithms.data.check import Report, Wanted, check
from service.spec import algorithm_specs
from service.spec.algorithm import RowKind
from service.spec.parts import Strings, TooLong
from service.spec.rows import FileFault, RowFile

REJECTED, UNUSABLE = 1, 2


class Unusable(Exception):
    """What was asked for cannot be done."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    asked = parser().parse_args(arguments)
    # Libraries print as they load; standard output is for the answer alone.
    answer_to = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with os.fdopen(answer_to, "w", encoding="utf-8") as stream:
        try:
            report = check_file(asked, stream)
        except (Unusable, FileFault) as error:
            sys.stderr.write(f"{error}\n")
            return UNUSABLE
        except OSError as error:
            sys.stderr.write(f"{asked.file} cannot be read: {error.strerror or error}\n")
            return UNUSABLE
        _say(stream, {"report": asdict(report)})
    return REJECTED if report.rejected or not report.accepted else 0


def parser() -> argparse.ArgumentParser:
    """What the command line may hold."""
    root = argparse.ArgumentParser(prog="python -m algorithms.data", description=__doc__)
    commands = root.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="reads a file and tells what is in it")
    checking.add_argument("file")
    checking.add_argument("--tokenizer", help="folder of a tokenizer; without it, no tokens")
    checking.add_argument("--algorithm", help="decides which rows are wanted")
    checking.add_argument("--max-length", type=int)
    checking.add_argument("--too-long", choices=get_args(TooLong), default="refuse")
    checking.add_argument("--strings", choices=get_args(Strings), default="chat")
    return root


def check_file(asked: argparse.Namespace, stream: TextIO) -> Report:
    """Checks what was asked for, and tells the progress.

    Raises:
        Unusable: the algorithm or the tokenizer is of no use.
        FileFault: the file holds no rows.
        OSError: the file cannot be read.
    """
    file = RowFile(asked.file)
    total = file.size()

    def progress(rows: int, read: int) -> None:
        _say(stream, {"progress": {"rows": rows, "bytes": read, "total": total}})

    wanted = Wanted(
        kind=_kind(asked.algorithm),
        chat=None if asked.tokenizer is None else _open_chat(asked.tokenizer),
        max_length=asked.max_length,
        too_long=asked.too_long,
        strings=asked.strings,
    )
    return check(file, wanted, progress)


def _kind(algorithm: str | None) -> RowKind | None:
    if algorithm is None:
        return None
    spec = algorithm_specs().get(algorithm)
    offline = [name for name, one in algorithm_specs().items() if not one.online]
    if spec is None or spec.online:
        why = "is unknown" if spec is None else "trains on its own samples, not on rows"
        raise Unusable(f"the algorithm {algorithm!r} {why}; use one of: {', '.join(offline)}")
    return spec.rows


def _open_chat(folder: str) -> ChatFormat:
    from transformers import AutoTokenizer  # takes seconds

    if not os.path.isdir(folder):
        raise Unusable(f"there is no folder {folder!r} with a tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return ChatFormat(tokenizer)
    except (ValueError, OSError) as error:
        raise Unusable(f"the tokenizer in {folder!r} cannot be used: {error}") from error


def _say(stream: TextIO, message: object) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
