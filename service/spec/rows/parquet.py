"""Rows of a Parquet file, by pyarrow, in batches.

A column has one type for all rows, so what one row does not have is null there: nulls are left out,
at any depth, and so is NaN, which is what pandas writes for a missing number.
"""

import math
from collections.abc import Iterator
from importlib import import_module
from typing import Any, BinaryIO

from service.spec.rows.faults import RowFault

MAGIC = b"PAR1"
ROWS_AT_ONCE = 256
MAX_GROUP_BYTES = 2 * 2**30
"""Largest row group, unpacked: it bounds what reading one may take."""


def rows(file: BinaryIO) -> Iterator[tuple[int, dict[str, Any] | RowFault]]:
    """Number and row of each row. A file that is damaged ends in a fault."""
    # Imported only here: it is large, and few files need it.
    arrow, reader = import_module("pyarrow"), import_module("pyarrow.parquet")
    number = 0
    try:
        table = reader.ParquetFile(file, pre_buffer=False)
        _check_groups(table.metadata)
        for batch in table.iter_batches(batch_size=ROWS_AT_ONCE, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                yield number, _plain(row)
    except (arrow.ArrowException, OSError, ValueError) as error:
        fault = RowFault(f"the Parquet file cannot be read on: {error}", "write it again")
        yield number + 1, fault


def _check_groups(metadata: Any) -> None:
    sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    if any(size > MAX_GROUP_BYTES for size in sizes):
        raise ValueError(f"a row group has more than {MAX_GROUP_BYTES} bytes; write smaller groups")


def _plain(value: Any) -> Any:
    """A value as JSON would have it."""
    if isinstance(value, dict):
        kept = ((str(name), _plain(item)) for name, item in value.items())
        return {name: item for name, item in kept if item is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    return str(value)  # times, decimals, bytes: of no column that a format knows
