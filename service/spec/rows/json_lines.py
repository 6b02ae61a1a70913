r"""JSON Lines, read by bytes.

A line ends at the byte `\n` and nowhere else. Python's `str.splitlines` also cuts at U+2028, U+2029
and U+0085, which JSON allows raw inside a string, so it would cut one row into two broken ones.
A `\r` before the `\n` is white space to JSON, and a byte order mark is let pass at the very start.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO

from service.spec.rows.faults import RowFault
from service.spec.rows.json_text import parse_object

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def rows(file: BinaryIO, limit: int) -> Iterator[tuple[int, dict[str, Any] | RowFault]]:
    """Number and row, or fault, of each line.

    Args:
        file: at its start.
        limit: longest line that is accepted, in bytes without its line end.
    """
    for number, line, terminated in _lines(file, limit):
        if line is None:
            fix = "split the row, or ask the operator for a higher limit"
            yield number, RowFault(f"the line is longer than {limit} bytes", fix)
        elif line.strip(b" \t\r"):
            try:
                yield number, parse_object(line, cut_off=not terminated)
            except RowFault as fault:
                yield number, fault
        elif terminated:
            yield number, RowFault("the line is blank", "remove it")


def _lines(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | None, bool]]:
    r"""Yields (number, line without `\n` or None where it is too long, whether it had a `\n`)."""
    number = 0
    while True:
        # Two bytes more for the line end; on line 1 three more for the byte order mark.
        line = file.readline(limit + 2 + (len(BYTE_ORDER_MARK) if number == 0 else 0))
        if not line:
            return
        number += 1
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        terminated = line.endswith(b"\n")
        body = line.removesuffix(b"\n").removesuffix(b"\r")
        if len(body) > limit:
            while not terminated and (rest := file.readline(limit)):
                terminated = rest.endswith(b"\n")
            yield number, None, terminated
        else:
            yield number, body, terminated
