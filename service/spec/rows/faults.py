"""What is wrong with a row, in words that an upload, a job and `planish data check` share."""

from typing import Any

MAX_QUOTED = 80


class RowFault(ValueError):
    """A row that cannot be used.

    Attributes:
        message: what is wrong, and where in the row.
        fix: what would be right, where that is known.
    """

    def __init__(self, message: str, fix: str | None = None) -> None:
        super().__init__(f"{message}; {fix}" if fix else message)
        self.message = message
        self.fix = fix


class FileFault(ValueError):
    """A file that holds no rows, or none in a form that can be read here."""


def kind_of(value: Any) -> str:
    """A JSON value's type, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"


def shown(value: Any) -> str:
    """A value for a message: a text is quoted, and cut where it is long; else its type."""
    if not isinstance(value, str):
        return "missing" if value is None else kind_of(value)
    quoted = repr(value)
    return quoted if len(quoted) <= MAX_QUOTED else quoted[:MAX_QUOTED] + "..."
