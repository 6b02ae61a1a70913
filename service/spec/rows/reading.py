"""Files of rows: JSON Lines, one JSON array, or Parquet, told apart by their first bytes.

A file is read once from front to back, and no more of it is in memory than one row (of Parquet, one
batch of rows). A bad row does not end the reading: it comes out as what is wrong with it, so that
whoever reads can go on and list them all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from service.spec.rows import json_array, json_lines, parquet
from service.spec.rows.faults import FileFault, RowFault
from service.spec.rows.location import Location, as_os_error, is_url, open_binary

MAX_ROW_BYTES = 16 * 2**20
"""Longest row of JSON, unless a caller sets less."""

type Encoding = Literal["JSON Lines", "JSON array", "Parquet"]

_FIRST_BYTES = 4096
_COMPRESSED = {b"\x1f\x8b": "gzip", b"(\xb5/\xfd": "zstd", b"PK\x03\x04": "zip", b"BZh": "bzip2"}


class RowError(ValueError):
    """A row of a file that cannot be used."""

    def __init__(self, place: str, fault: RowFault) -> None:
        super().__init__(f"{place}: {fault}")
        self.place = place
        self.fault = fault


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as it stands in the file.

    Attributes:
        number: the first is 1; of JSON Lines it counts lines.
        place: `line 7` or `row 7`, for messages.
        fields: the row, or what is wrong with it.
    """

    number: int
    place: str
    fields: dict[str, Any] | RowFault

    def unwrap(self) -> dict[str, Any]:
        """The row.

        Raises:
            RowError: it is a bad one.
        """
        if isinstance(self.fields, RowFault):
            raise RowError(self.place, self.fields)
        return self.fields


class RowFile:
    """The rows of one file; each iteration reads it anew."""

    def __init__(self, location: Location, *, max_row_bytes: int = MAX_ROW_BYTES) -> None:
        """Opens nothing yet.

        Args:
            location: a path, or a URL such as `s3://bucket/rows.parquet`.
            max_row_bytes: longest row of JSON that is accepted, without its line end.
        """
        self.location = location
        self.bytes_read = 0
        """How far the newest iteration has come."""
        self._max_row_bytes = max_row_bytes

    def __iter__(self) -> Iterator[RawRow]:
        """Yields every row in file order.

        Raises:
            FileFault: it holds no rows, or nothing that can be read.
            OSError: the file cannot be read.
        """
        with open_binary(self.location) as file:
            encoding = sniff(file)
            unit = "line" if encoding == "JSON Lines" else "row"
            empty = True
            for number, fields in self._guarded(self._rows(file, encoding)):
                empty = False
                self.bytes_read = file.tell()
                yield RawRow(number, f"{unit} {number}", fields)
            if empty:
                raise FileFault("the file is empty")

    def size(self) -> int:
        """Its length in bytes.

        Raises:
            OSError: the file cannot be read.
        """
        with open_binary(self.location) as file:
            return file.seek(0, 2)

    def _guarded(
        self, rows: Iterator[tuple[int, dict[str, Any] | RowFault]]
    ) -> Iterator[tuple[int, dict[str, Any] | RowFault]]:
        """The same rows; what a store raises in the middle becomes an OSError."""
        try:
            yield from rows
        except FileFault:
            raise
        except Exception as error:
            if not is_url(self.location):
                raise
            raise as_os_error(error, self.location) from error

    def _rows(
        self, file: BinaryIO, encoding: Encoding
    ) -> Iterator[tuple[int, dict[str, Any] | RowFault]]:
        if encoding == "Parquet":
            return parquet.rows(file)
        read = json_lines.rows if encoding == "JSON Lines" else json_array.rows
        return read(file, self._max_row_bytes)


def sniff(file: BinaryIO) -> Encoding:
    """What a file holds; it is left at its start.

    Raises:
        FileFault: it is compressed.
    """
    first = file.read(_FIRST_BYTES)
    file.seek(0)
    for magic, name in _COMPRESSED.items():
        if first.startswith(magic):
            raise FileFault(f"the file is compressed ({name}); unpack it first")
    if first.startswith(parquet.MAGIC):
        return "Parquet"
    body = first.removeprefix(json_lines.BYTE_ORDER_MARK).lstrip(b" \t\r\n")
    return "JSON array" if body.startswith(b"[") else "JSON Lines"
