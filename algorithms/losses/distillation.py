"""How far a student's distribution is from its teacher's, at one token.

A teacher tells the log-probs of K candidates only: of a vocabulary of 150,000 that is all that can
be kept of each token. What is left of either distribution is one more outcome, so both are told of
K + 1 outcomes, and both are whole. Telling outcomes apart less finely can only lower a divergence
of this kind: it is a lower bound of the one over the whole vocabulary, and rises to it with K.

The rest is 1 less a sum, which rounding leaves at up to 1e-7 where it is 0, and its logarithm
anywhere. Below `REST_FLOOR` it is therefore taken to be that, without gradient. Where the
candidates are the whole vocabulary it is so for both distributions, and adds exactly 0.
"""

import math

import torch
from torch import Tensor

from service.spec.algorithms.distillation import Divergence

REST_FLOOR = 1e-6
"""What is left to all other tokens, at least."""


def outcomes(log_probs: Tensor) -> Tensor:
    """[..., K + 1] float64: the candidates, and behind them all other tokens as one.

    Args:
        log_probs: [..., K] of K different tokens.
    """
    exact = log_probs.double()
    rest = (1.0 - exact.exp().sum(-1, keepdim=True)).clamp(min=REST_FLOOR).log()
    return torch.cat([exact, rest], dim=-1)


def divergence(teacher: Tensor, student: Tensor, kind: Divergence, *, js_beta: float) -> Tensor:
    """The named divergence between teacher P and student Q (GKD, arXiv 2306.13649, section 2).

        forward-kl:  KL(P || Q) = sum P (log P - log Q)
        reverse-kl:  KL(Q || P)
        js:          b KL(P || M) + (1 - b) KL(Q || M),  M = b P + (1 - b) Q      (eq. 1)

    Args:
        teacher: [..., N] log-probs of all N outcomes.
        student: [..., N] likewise, with gradient.
        kind: which.
        js_beta: b, above 0 and below 1; it counts for `js` alone.

    Returns:
        [...], at least 0 but for rounding.
    """
    if kind == "forward-kl":
        return _kl(teacher, student)
    if kind == "reverse-kl":
        return _kl(student, teacher)
    of_teacher, of_student = math.log(js_beta), math.log1p(-js_beta)
    mixture = torch.logaddexp(teacher + of_teacher, student + of_student)
    return js_beta * _kl(teacher, mixture) + (1.0 - js_beta) * _kl(student, mixture)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    """KL(one || other) [...] of log-probs [..., N]."""
    return (one.exp() * (one - other)).sum(-1)
