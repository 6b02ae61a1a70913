"""The one rule for rows of too many tokens."""

from collections.abc import Sequence

from algorithms.data.chat import TokenizedChat
from service.spec.parts import TooLong
from service.spec.rows import RowFault


def fit(
    sequences: Sequence[TokenizedChat], max_length: int, rule: TooLong
) -> Sequence[TokenizedChat] | None:
    """A row's sequences themselves where all fit, else what the rule leaves of them.

    A row is dropped as a whole. What `truncate-left` takes off, it takes off both answers of a
    pair alike, so that they keep one prompt; where that would cut into an answer, the pair is
    dropped. A row with a sequence without a trained token is dropped, too.

    Args:
        sequences: one, or the two of a pair.
        max_length: longest sequence that is trained.
        rule: `data.too_long` of the job.

    Returns:
        The sequences, or None where the row is dropped.

    Raises:
        RowFault: the rule is `refuse`.
    """
    longest = max(len(sequence.token_ids) for sequence in sequences)
    if longest <= max_length:
        return sequences
    if rule == "refuse":
        raise RowFault(
            f"{longest} tokens, but `training.max_length` is {max_length}",
            "raise it, shorten the row, or set `data.too_long`",
        )
    if rule == "drop":
        return None
    start = longest - max_length if rule == "truncate-left" else 0
    if start and len(sequences) > 1 and start >= sequences[0].trained.index(1):
        return None
    kept = [_cut(sequence, slice(start, start + max_length)) for sequence in sequences]
    # Nothing predicts a sequence's first token, so it is never trained.
    return kept if all(any(sequence.trained[1:]) for sequence in kept) else None


def _cut(sequence: TokenizedChat, kept: slice) -> TokenizedChat:
    return TokenizedChat(token_ids=sequence.token_ids[kept], trained=sequence.trained[kept])
