"""JSON of a row, read strictly: what no tokenizer can take, or what says two things, is refused."""

import json
import math
from typing import Any

from service.spec.rows.faults import RowFault, kind_of, shown


def parse_object(text: bytes, *, cut_off: bool = False) -> dict[str, Any]:
    """The JSON object that a row is.

    Args:
        text: the row's bytes.
        cut_off: whether the file ends in this row, without a line end; it is worth a hint.

    Raises:
        RowFault: it is no UTF-8, no JSON, no object, or holds a key twice, NaN, a number out of
            range or half of a surrogate pair.
    """
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowFault(f"not UTF-8 at byte {error.start + 1} of the row", "save as UTF-8") from None
    try:
        row = json.loads(
            decoded,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_refuse_duplicates,
        )
    except json.JSONDecodeError as error:
        cut = "; the file ends in this line, so the upload may be cut off" if cut_off else ""
        raise RowFault(
            f"not JSON: {error.msg} at column {error.colno}{cut}", "write one JSON object a line"
        ) from None
    except RecursionError:
        raise RowFault("nested too deeply", "flatten it") from None
    except RowFault:
        raise
    except ValueError:  # an integer with more digits than Python converts
        raise RowFault("a number has too many digits", "write it as a string") from None
    if "\\u" in decoded:  # surrogates can only come from escapes: the bytes were valid UTF-8
        _refuse_lone_surrogates(row)
    if not isinstance(row, dict):
        raise RowFault(
            f"the row is {kind_of(row)}, not an object", 'write {"messages": [...]} on each line'
        )
    return row


def _refuse_constant(name: str) -> None:
    raise RowFault(f"{name} is no JSON number", "use null or a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise RowFault(f"the number {shown(text)} is out of range", "use a smaller one")
    return number


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowFault(f"the key {shown(twice)} occurs twice in one object", "keep one of them")
    return row


def _refuse_lone_surrogates(row: Any) -> None:
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise RowFault(
            "a lone surrogate (one half of a pair like \\ud83d\\ude00) in a string",
            "write both halves, or the character itself in UTF-8",
        ) from None
