"""The formats that users have, told apart by their fields.

A row is of the format whose fields it has, of all such formats of the one that asks for most:
`messages` with a `label` is a labelled answer and no chat. Where two ask for fields that the other
does not know, nobody can tell what the row means, and it is refused with both names.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.spec.rows import parsers
from service.spec.rows.faults import RowFault
from service.spec.rows.parsers import LABELS, Fields
from service.spec.rows.shapes import Kind, Row

NOT_TEXT = ("images", "videos", "audios")
"""Without them, the text of a row that has them says something else."""
MAX_NAMES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    Attributes:
        name: for people.
        kind: of its rows.
        fields: those it is known by; `label` stands for both of `LABELS`.
        parse: reads a row that has them.
    """

    name: str
    kind: Kind
    fields: Sequence[str]
    parse: Callable[[Fields], Row]

    @property
    def needs(self) -> frozenset[str]:
        """Its fields, whatever their order."""
        return frozenset(self.fields)


def format_of(row: Fields) -> Format:
    """The format of a row.

    Raises:
        RowFault: it is of none, or of more than one.
    """
    for name in NOT_TEXT:
        if row.get(name):
            raise RowFault(f"the row has `{name}`, and only text can be trained on", "leave it out")
    present = {"label" if name in LABELS else name for name, v in row.items() if v is not None}
    if row.get("messages") is not None and row.get("messages") == row.get("chosen"):
        present.discard("messages")  # UltraFeedback has the better answer twice
    matching = [one for one in FORMATS if one.needs <= present]
    best = [one for one in matching if not any(one.needs < other.needs for other in matching)]
    if len(best) == 1:
        return best[0]
    if best:
        possible = " or ".join(f"{one.name} ({_names(one.fields)})" for one in best)
        raise RowFault(
            f"the row's fields do not tell what it is: {possible}", "remove the fields of the other"
        )
    seen = _names([name for name, value in row.items() if value is not None])
    raise RowFault(
        f"no known format has the row's fields ({seen or 'it has none'})", _nearest(present)
    )


def parse_row(row: Fields) -> Row:
    """Reads a row of any format; fields that its format does not know are left alone.

    Raises:
        RowFault: with the place in the row, and what would be right.
    """
    return format_of(row).parse(row)


def _names(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(f"`{name[:40]}`" for name in names[:MAX_NAMES_SHOWN]) + more


def _nearest(present: set[str]) -> str:
    """What would be right: the rest of a format that the row begins, else all there are."""
    begun = [one for one in FORMATS if one.needs & present]
    if not begun:
        return "use one of: " + "; ".join(_names(one.fields) for one in FORMATS)
    nearest = min(begun, key=lambda one: (len(one.needs - present), -len(one.needs & present)))
    lacking = [name for name in nearest.fields if name not in present]
    return f"for {nearest.name} it lacks {_names(lacking)}"


def _format(name: str, kind: Kind, needs: str, parse: Callable[[Fields], Row]) -> Format:
    return Format(name, kind, tuple(needs.split()), parse)


FORMATS: Sequence[Format] = (
    _format("OpenAI chat", "conversation", "messages", parsers.chat),
    _format("ShareGPT", "conversation", "conversations", parsers.turns),
    _format("Alpaca", "conversation", "instruction output", parsers.instruction),
    _format("prompt and completion", "conversation", "prompt completion", parsers.completion),
    _format("GSM8K", "conversation", "question answer", parsers.question),
    _format(
        "OpenAI preference",
        "preference",
        "input preferred_output non_preferred_output",
        parsers.openai_pair,
    ),
    _format("chosen and rejected", "preference", "chosen rejected", parsers.implicit_pair),
    _format("chosen and rejected", "preference", "prompt chosen rejected", parsers.prompt_pair),
    _format("chosen and rejected", "preference", "messages chosen rejected", parsers.chat_pair),
    _format("ShareGPT pairs", "preference", "conversations chosen rejected", parsers.turns_pair),
    _format("Alpaca pairs", "preference", "instruction chosen rejected", parsers.instruction_pair),
    _format("labelled chat", "label", "messages label", parsers.labelled_chat),
    _format("labelled ShareGPT", "label", "conversations label", parsers.labelled_turns),
    _format("labelled Alpaca", "label", "instruction output label", parsers.labelled_instruction),
    _format("KTO", "label", "prompt completion label", parsers.labelled_completion),
    _format("verl", "prompt", "data_source prompt reward_model", parsers.verl),
)
