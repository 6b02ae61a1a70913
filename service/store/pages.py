"""Pages of a listing, newest first.

A cursor holds the (created_at, id) of the last row seen, not the row's place: new rows and deleted
rows, the cursor's own among them, neither repeat nor skip another.
"""

import base64
import binascii
import json
import math
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, and_, or_

from service.store.errors import StoreError


class BadCursor(StoreError):
    """The cursor was not made by this service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page[Item]:
    """A part of a listing."""

    items: list[Item]
    has_more: bool
    cursor: str | None
    """Pass it as `after` to get the next page; null on an empty one."""


def cursor_of(created_at: float, key: str) -> str:
    """The cursor that stands after the row (created_at, key)."""
    return base64.urlsafe_b64encode(json.dumps([created_at, key]).encode()).decode()


def paged(query: Select[Any], table: Table, *, limit: int, after: str | None) -> Select[Any]:
    """Orders `query` and cuts it to one row more than `limit`, which tells whether more follow.

    Raises:
        BadCursor: `after` is no cursor.
    """
    if after is not None:
        query = query.where(_older_than(table, after))
    return query.order_by(table.c.created_at.desc(), table.c.id.desc()).limit(limit + 1)


def _older_than(table: Table, cursor: str) -> ColumnElement[bool]:
    try:
        created_at, key = json.loads(base64.urlsafe_b64decode(cursor.encode()))
    except (binascii.Error, UnicodeError, ValueError, TypeError) as error:
        raise BadCursor(f"{cursor!r} is no cursor of this service") from error
    # A cursor of our own making holds a float; a long integer would be too large for the database.
    if (
        not isinstance(created_at, float)
        or not math.isfinite(created_at)
        or not isinstance(key, str)
        or not (key.isascii() and key.isprintable())
    ):
        raise BadCursor(f"{cursor!r} is no cursor of this service")
    return or_(
        table.c.created_at < created_at,
        and_(table.c.created_at == created_at, table.c.id < key),
    )
