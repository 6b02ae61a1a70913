"""A batch's answers under the prompts of other rows, from which KTO takes its reference point.

Which answer goes under which prompt follows from the rows alone, not from their places: the same
rows in another order give the same sequences. Rows are put into the order of a hash, all rows of
one prompt beside each other, and each gets the answer of the row that is as many places before it
as the commonest prompt has rows. So no row gets an answer to its own prompt, unless more than half
of all rows share one; and none gets its own answer back, unless it is alone. (Reversing a batch
would leave the middle row of an odd number its own.)
"""

from collections import Counter
from hashlib import sha256

import torch
from torch import Tensor

from algorithms.batch import Batch


def swapped_answers(batch: Batch) -> Batch:
    """Each trained row's prompt, with the answer of another trained row.

    An answer is everything from the first trained token on. Where both do not fit into the batch's
    width, the prompt loses tokens from its start, and the answer stays whole. Rows without a
    trained token stay as they are. Where a single row is trained, no token of it is any more: it
    has no other to swap with.
    """
    width, mask = batch.tokens.shape[1], batch.loss_mask
    firsts = (mask > 0).int().argmax(dim=1).tolist()
    tokens, lengths, trained = batch.tokens.clone(), batch.lengths.clone(), mask.clone()
    for row, other in answer_sources(batch).items():
        answer = slice(firsts[other], int(batch.lengths[other]))
        size = answer.stop - answer.start
        kept = min(firsts[row], width - size)
        prompt = batch.tokens[row, firsts[row] - kept : firsts[row]]
        tokens[row, : kept + size] = torch.cat([prompt, batch.tokens[other, answer]])
        lengths[row], trained[row] = kept + size, 0.0
        if row != other:
            trained[row, kept : kept + size] = mask[other, answer]
    return Batch(tokens=tokens, lengths=lengths, loss_mask=trained)


def answer_sources(batch: Batch) -> dict[int, int]:
    """For each row that is trained, the row whose answer it gets; each answer is given once."""
    keys: dict[int, tuple[bytes, bytes]] = {}
    for row in (batch.loss_mask.sum(dim=1) > 0).nonzero().flatten().tolist():
        first = int((batch.loss_mask[row] > 0).int().argmax())
        whole = batch.tokens[row, : int(batch.lengths[row])]
        keys[row] = (_digest(whole[:first]), _digest(whole))
    commonest = max(Counter(prompt for prompt, _ in keys.values()).values(), default=0)
    shift = commonest if commonest < len(keys) else 1
    order = sorted(keys, key=keys.__getitem__)
    return {row: order[place - shift] for place, row in enumerate(order)}


def _digest(tokens: Tensor) -> bytes:
    return sha256(tokens.numpy().tobytes()).digest()
