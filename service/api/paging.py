"""Query parameters of lists."""

import re
from collections.abc import Callable
from typing import Annotated

from fastapi import Query

from service.store import BadCursor, NotFound, Page
from service.store.pages import cursor_of
from service.validation.problems import FieldProblem, InvalidRequest, quote

Limit = Annotated[int, Query(ge=1, le=100, description="Rows of a page, 1 to 100.")]
After = Annotated[
    str | None,
    Query(
        max_length=512,
        description="`next` of the page before, or the id of a row that still exists.",
    ),
]
_ID = re.compile(r"(job|file)-[a-z0-9]{16,32}")


def read_page[Row](
    fetch: Callable[[str | None], Page[Row]],
    after: str | None,
    created_at: Callable[[str], float],
) -> Page[Row]:
    """A page that begins after a cursor, or after the row with an id.

    The OpenAI SDK sends the id of the last row. Our own `next` holds the row's place itself, so it
    stays good when that row is deleted.

    Args:
        fetch: reads the page after a cursor.
        after: from the request.
        created_at: the time of a row, by its id; raises NotFound.

    Raises:
        InvalidRequest: `after` is neither.
    """
    try:
        if after is not None and _ID.fullmatch(after):
            after = cursor_of(created_at(after), after)
        return fetch(after)
    except (BadCursor, NotFound):
        raise InvalidRequest(
            [
                FieldProblem(
                    field="after",
                    message=f"{quote(after or '')} is no place in this list",
                    fix="send `next` of the page before, or leave it out",
                )
            ]
        ) from None
