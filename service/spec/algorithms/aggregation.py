"""How the losses of tokens become one number; see `algorithms.losses.aggregation.aggregate`."""

from typing import Literal

TokenAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
LossAggregation = TokenAggregation | Literal["seq-mean-token-sum-norm"]
