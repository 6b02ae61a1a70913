"""Writes Parquet files for tests of what reads them."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], *, group: int = 1000) -> None:
    """Rows as columns; what one row lacks is null, as Parquet has it."""
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(list(rows)), path, row_group_size=group)
