"""Which rows an algorithm takes."""

from service.spec.algorithm import RowKind, algorithm_specs
from service.spec.rows.faults import RowFault
from service.spec.rows.formats import Format
from service.spec.rows.shapes import Kind

_SAYS: dict[Kind, str] = {
    "conversation": "a conversation",
    "preference": "a pair of answers",
    "label": "an answer with a label",
    "prompt": "a prompt without an answer",
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
            f"give it another file; this one is for {_algorithms_for(found.kind)}",
        )


def _algorithms_for(kind: Kind) -> str:
    """Names of those that train on rows of a kind."""
    specs = algorithm_specs().items()
    names = [name for name, spec in specs if not spec.online and spec.rows == kind]
    return ", ".join(names) or "no algorithm that trains on rows"
