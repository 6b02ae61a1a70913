"""What is known about uploaded files; their bytes lie in the data folder."""

from sqlalchemy import delete, insert, select

from service.jobs.records import File
from service.store import tables
from service.store.database import Database
from service.store.errors import NotFound
from service.store.pages import Page, cursor_of, paged

_table = tables.files


class Files:
    """The uploaded files."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, file: File) -> None:
        """Keeps a file's row; its bytes must be in their place before."""
        values = {column.name: getattr(file, column.name) for column in _table.c}
        with self._database.writing() as connection:
            connection.execute(insert(_table).values(values))

    def get(self, file_id: str) -> File:
        """One file.

        Raises:
            NotFound: there is none.
        """
        with self._database.reading() as connection:
            query = select(_table).where(_table.c.id == file_id)
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise NotFound("file", file_id)
        return File(**row)

    def page(self, *, limit: int, after: str | None = None) -> Page[File]:
        """One page of files, newest first.

        Raises:
            BadCursor: `after` is no cursor.
        """
        query = paged(select(_table), _table, limit=limit, after=after)
        with self._database.reading() as connection:
            found = [File(**row) for row in connection.execute(query).mappings()]
        items = found[:limit]
        return Page(
            items=items,
            has_more=len(found) > limit,
            cursor=cursor_of(items[-1].created_at, items[-1].id) if items else None,
        )

    def remove(self, file_id: str) -> None:
        """Forgets a file; delete its bytes after.

        Raises:
            NotFound: there is none.
        """
        with self._database.writing() as connection:
            gone = connection.execute(delete(_table).where(_table.c.id == file_id)).rowcount
        if not gone:
            raise NotFound("file", file_id)
