"""A JSON file that is one array of rows, read without having all of it in memory.

Rows are cut at the commas between them, which are those at the array's own depth outside strings;
what stands between two cuts is then parsed as any row is.
"""

import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from service.spec.rows.faults import RowFault
from service.spec.rows.json_lines import BYTE_ORDER_MARK
from service.spec.rows.json_text import parse_object

PIECE_BYTES = 2**20
_MARKS = re.compile(rb'\\.|["{}\[\],]', re.DOTALL)


def rows(file: BinaryIO, limit: int) -> Iterator[tuple[int, dict[str, Any] | RowFault]]:
    """Number and row, or fault, of each element; after the array's end nothing may follow.

    Args:
        file: at its start; its first character is `[`.
        limit: longest row that is accepted, in bytes.
    """
    cutter = _Cutter(limit)
    number = 0
    while piece := file.read(PIECE_BYTES):
        for element in cutter.feed(piece):
            if cutter.closed and not number and element is not None and not element.strip():
                continue  # an empty array
            number += 1
            yield number, _parse(element, limit)
    if not cutter.closed:
        yield number + 1, RowFault("the file ends before its array does; it may be cut off")
    elif cutter.rest.strip():
        yield number + 1, RowFault("something follows the end of the array", "remove it")


def _parse(element: bytes | None, limit: int) -> dict[str, Any] | RowFault:
    if element is None:
        return RowFault(f"the row is longer than {limit} bytes", "split the row")
    try:
        return parse_object(element.strip())
    except RowFault as fault:
        return fault


class _Cutter:
    """Cuts what it is fed into the elements of one array."""

    def __init__(self, limit: int) -> None:
        self.closed = False
        self.rest = b""
        """What follows the array, its beginning."""
        self._limit = limit
        self._depth = 0
        self._in_string = False
        self._escape = b""
        self._element = bytearray()
        self._too_long = False

    def feed(self, piece: bytes) -> Iterator[bytes | None]:
        """Elements that end in the piece; None for one that is longer than the limit."""
        data, self._escape = self._escape + piece, b""
        if not self._depth and not self.closed:
            data = data.removeprefix(BYTE_ORDER_MARK)
        if (len(data) - len(data.rstrip(b"\\"))) % 2:
            data, self._escape = data[:-1], b"\\"  # the escaped byte comes with the next piece
        start = 0
        for mark in _MARKS.finditer(data):
            if self.closed:
                break
            byte = mark.group()
            if byte == b'"':
                self._in_string = not self._in_string
            elif self._in_string or byte.startswith(b"\\"):
                continue
            elif byte in b"[{":
                self._depth += 1
                start = mark.end() if self._depth == 1 else start
            elif byte == b"," and self._depth > 1:
                continue
            elif byte == b"," or self._depth == 1:
                self._take(data[start : mark.start()])
                start = mark.end()
                self.closed = byte != b","
                self._depth -= self.closed
                yield self._element_whole()
            else:
                self._depth -= 1
        if self.closed:
            self.rest += data[start : start + PIECE_BYTES - len(self.rest)]
        else:
            self._take(data[start:])

    def _take(self, data: bytes) -> None:
        if len(self._element) + len(data) > self._limit + PIECE_BYTES:
            self._too_long = True
            self._element.clear()
        elif not self._too_long:
            self._element += data

    def _element_whole(self) -> bytes | None:
        element = bytes(self._element).strip()
        too_long = self._too_long or len(element) > self._limit
        self._element.clear()
        self._too_long = False
        return None if too_long else element
