"""From token losses to one number, with denominators of the whole optimizer step.

The mean of means is the commonest silent fault in this field: dividing inside a micro-batch weighs
the tokens of short micro-batches more, and then the gradient depends on how a batch was split.
Here the sum is taken over the micro-batch, and the divisor comes from the `Normalizer`, which was
counted before the split. The shares of all micro-batches and ranks then add up to the step's loss.
"""

from torch import Tensor

from algorithms.batch import Normalizer
from service.spec.algorithms.aggregation import LossAggregation


def aggregate(
    values: Tensor,
    mask: Tensor,
    aggregation: LossAggregation,
    normalizer: Normalizer,
    *,
    length_constant: int = 1,
) -> Tensor:
    """A micro-batch's share of the step's loss.

    With m the mask, N the step's trained tokens and S its sequences that have any:

        token-mean:               sum_bt m v / N                    (DAPO, arXiv 2503.14476, eq. 8)
        seq-mean-token-mean:      sum_b (sum_t m v / sum_t m) / S   (GRPO, arXiv 2402.03300, eq. 3)
        seq-mean-token-sum:       sum_b sum_t m v / S
        seq-mean-token-sum-norm:  sum_b sum_t m v / (S L)           (Dr. GRPO, arXiv 2503.20783)

    A fully masked sequence adds nothing and is not counted in S.

    Args:
        values: [B, T] with gradient.
        mask: [B, T], 1 where the token is trained. What is masked may be NaN.
        aggregation: one of the names.
        normalizer: counts of the whole step.
        length_constant: L.

    Returns:
        A scalar, attached to the graph even where the whole mask is 0.
    """
    kept = values.masked_fill(mask == 0, 0.0)
    if aggregation == "token-mean":
        return kept.sum() / normalizer.tokens
    per_sequence = kept.sum(dim=1)
    if aggregation == "seq-mean-token-mean":
        per_sequence = per_sequence / mask.sum(dim=1).clamp(min=1.0)
    elif aggregation == "seq-mean-token-sum-norm":
        per_sequence = per_sequence / length_constant
    return per_sequence.sum() / normalizer.sequences
