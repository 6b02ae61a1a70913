"""Connections and transactions.

SQLite gets WAL with synchronous=FULL: a transaction that was answered is on disk, even where the
machine loses power. A writing transaction begins with BEGIN IMMEDIATE, so it waits for its turn
before it reads; the default, which takes the write lock at the first write, fails at once where
somebody wrote in between. On PostgreSQL the same order comes from row locks: every writer of a job
first selects its row FOR UPDATE (SQLite ignores that clause).
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url

_BUSY_TIMEOUT_SECONDS = 30
_SECONDS_BETWEEN_TRIES = 0.02
_READ_ONLY = "planish_read_only"


class Database:
    """One SQLAlchemy engine, with short reading and writing transactions."""

    def __init__(self, url: str) -> None:
        """Opens `url` (`sqlite:///PATH` or a PostgreSQL URL); nothing is connected yet.

        What SQLAlchemy says of a failed statement goes into logs: it does not quote the values.
        """
        parsed = make_url(url)
        if parsed.get_backend_name() == "sqlite":
            if parsed.database in (None, "", ":memory:"):
                raise ValueError(f"{url!r}: the service needs a database on disk")
            Path(str(parsed.database)).parent.mkdir(parents=True, exist_ok=True)
            self.engine: Engine = create_engine(
                parsed, hide_parameters=True, connect_args={"timeout": _BUSY_TIMEOUT_SECONDS}
            )
            event.listen(self.engine, "connect", _prepare_sqlite)
            event.listen(self.engine, "begin", _begin_sqlite)
        else:
            self.engine = create_engine(parsed, hide_parameters=True, pool_pre_ping=True)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that only reads and blocks nobody."""
        with self.engine.connect() as connection:
            connection = connection.execution_options(**{_READ_ONLY: True})
            with connection.begin():
                yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that writes: committed at the end, rolled back where the body raises."""
        with self.engine.begin() as connection:
            yield connection

    def close(self) -> None:
        """Closes the pooled connections."""
        self.engine.dispose()


def _prepare_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself; _begin_sqlite does
    _write_ahead(connection)
    for pragma in ("synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Puts the file into WAL mode, which it then keeps for good.

    The change needs the file for itself, and SQLite does not wait for that as it waits for its turn
    to write: where two services open a new database at once, one is refused at once. It tries again
    until the other is done.
    """
    deadline = time.monotonic() + _BUSY_TIMEOUT_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline:
                raise
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _begin_sqlite(connection: Connection) -> None:
    read_only = connection.get_execution_options().get(_READ_ONLY, False)
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")
