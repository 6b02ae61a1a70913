"""Which rows an algorithm takes."""

from service.spec.algorithm import RowKind
from service.spec.rows.faults import RowFault
from service.spec.rows.formats import Format
from service.spec.rows.shapes import Kind

_SAYS: dict[Kind, str] = {
    "conversation": "a conversation",
    "preference": "a pair of answers",
    "label": "an answer with a label",
    "prompt": "a prompt without an answer",
}
_TAKES: dict[Kind, str] = {
    "conversation": "sft",
    "preference": "dpo, simpo, orpo and reward_model",
    "label": "kto",
    "prompt": "nothing that trains on rows",
}


def check_format(found: Format, wanted: RowKind) -> None:
    """Whether rows of a format are what an algorithm takes.

    Nothing is turned into another kind: to train on the better answers of pairs, or on the good
    ones of labelled answers, is the user's to decide, by a file of its own.

    Raises:
        RowFault: they are of another kind.
    """
    if found.kind != wanted:
        raise RowFault(
            f"the row is {_SAYS[found.kind]} ({found.name}), but the algorithm trains on rows "
            f"that are each {_SAYS[wanted]}",
            f"give it another file; this one is for {_TAKES[found.kind]}",
        )
