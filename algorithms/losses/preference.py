"""Losses on whole answers: which of two is better, or whether one is good.

All are elementwise, on a number for each pair (P pairs) or each answer (N answers), with nothing
summed: the caller divides by the step's own counts. `logsigmoid(x)` is log(sigmoid(x)) without
overflow: it goes to 0 on the one side and to x on the other.

An answer's log-probs are summed in float64. A long answer's sum is in the thousands, and what is
learned from is a difference of two such sums: float32 would leave only three or four digits of it.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

# The largest probability that a float32 log-prob tells from 1 is 6e-8 below it.
SMALLEST_REST = 1e-7


def sequence_log_probs(log_probs: Tensor, mask: Tensor, *, mean: bool = False) -> Tensor:
    """[N] float64 log-prob of each row's trained tokens: their sum, or their mean.

    Args:
        log_probs: [N, T], or differences of log-probs. What is masked may be NaN.
        mask: [N, T], 1 where the token is trained. A row without any gives 0.
        mean: divide by the number of trained tokens.
    """
    sums = log_probs.masked_fill(mask == 0, 0.0).sum(dim=1, dtype=torch.float64)
    return sums / mask.sum(dim=1).clamp(min=1.0) if mean else sums


def sigmoid_loss(margins: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """DPO (arXiv 2305.18290, eq. 7); with label smoothing conservative DPO (E. Mitchell, "A note on
    DPO with noisy preferences & relationship to IPO", 2023).

        -(1 - e) log sigmoid(m) - e log sigmoid(-m)

    Args:
        margins: [P] reward of the chosen answer less that of the rejected one.
        label_smoothing: e, the share of labels that are taken to be the wrong way round.
    """
    true, flipped = -logsigmoid(margins), -logsigmoid(-margins)
    return (1.0 - label_smoothing) * true + label_smoothing * flipped


def robust_loss(margins: Tensor, *, label_smoothing: float) -> Tensor:
    """Robust DPO (arXiv 2403.00409, section 3): its mean over labels that are flipped at the rate e
    is DPO's loss on the true ones.

        (-(1 - e) log sigmoid(m) + e log sigmoid(-m)) / (1 - 2 e)

    It has no lower bound: m to infinity gives -e m / (1 - 2 e).

    Args:
        margins: [P] as in `sigmoid_loss`.
        label_smoothing: e, below 1/2.
    """
    true, flipped = -logsigmoid(margins), -logsigmoid(-margins)
    return ((1.0 - label_smoothing) * true - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def hinge_loss(margins: Tensor) -> Tensor:
    """max(0, 1 - m): SLiC's calibration loss (arXiv 2305.10425, eq. 1) on DPO's margins."""
    return relu(1.0 - margins)


def ipo_loss(log_ratio_differences: Tensor, *, beta: float) -> Tensor:
    """(h - 1 / (2 beta))^2: IPO (arXiv 2310.12036, eq. 17), where its tau is beta.

    Args:
        log_ratio_differences: [P] h, log-ratio (policy to reference) of the chosen answer less that
            of the rejected one, not scaled.
        beta: how closely the policy is held to the reference.
    """
    return (log_ratio_differences - 1.0 / (2.0 * beta)).square()


def simpo_loss(mean_log_prob_differences: Tensor, *, beta: float, gamma: float) -> Tensor:
    """-log sigmoid(beta d - gamma): SimPO (arXiv 2405.14734, eq. 6).

    Args:
        mean_log_prob_differences: [P] d, mean log-prob of a token of the chosen answer less that
            of the rejected one.
        beta: scale.
        gamma: target margin, after scaling.
    """
    return -logsigmoid(beta * mean_log_prob_differences - gamma)


def log_odds(mean_log_probs: Tensor) -> Tensor:
    """[N] log(p / (1 - p)) where p is the geometric mean of an answer's token probabilities (ORPO,
    arXiv 2403.07691, eq. 4).

    1 - p is at least `SMALLEST_REST`: an answer that the model is sure of has odds of 1e7, and a
    gradient of 1 where the true one would be without bound.

    Args:
        mean_log_probs: [N] log p, at most 0.
    """
    rest = -torch.expm1(mean_log_probs)
    return mean_log_probs - rest.clamp(min=SMALLEST_REST).log()


def odds_ratio_loss(log_odds_ratios: Tensor) -> Tensor:
    """-log sigmoid(log(odds of chosen / odds of rejected)), [P] (ORPO, arXiv 2403.07691, eq. 7)."""
    return -logsigmoid(log_odds_ratios)


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, *, margins: Tensor | None = None, center_coef: float = 0.0
) -> Tensor:
    """-log sigmoid(c - r - m) + center_coef (c + r)^2, of scores c and r.

    The first term is Ouyang et al. (arXiv 2203.02155, eq. 1), m the margin of Llama 2 (arXiv
    2307.09288, eq. 2), the last term Eisenstein et al. (arXiv 2312.09244): a constant added to all
    scores changes nothing of the first, and the last keeps that constant near 0.

    Args:
        chosen: [P] scores of the chosen answers.
        rejected: [P] scores of the rejected ones.
        margins: [P], by how much the chosen answer is to be better; None for 0.
        center_coef: weight of the last term.
    """
    difference = chosen - rejected if margins is None else chosen - rejected - margins
    return -logsigmoid(difference) + center_coef * (chosen + rejected).square()


def kto_loss(
    rewards: Tensor,
    reference_rewards: Tensor,
    desirable: Tensor,
    *,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """KTO (arXiv 2402.01306, section 4), the weight less the value of each answer:

        desirable:    w_d (1 - sigmoid(r - z))
        undesirable:  w_u (1 - sigmoid(z - r))

    Args:
        rewards: [N] r, beta times the log-ratio of policy to reference.
        reference_rewards: [N] z, beta times the reference point; not trained.
        desirable: [N] 1 where the answer is good, 0 where it is bad.
        desirable_weight: w_d.
        undesirable_weight: w_u.
    """
    above = rewards - reference_rewards.detach()
    good = desirable_weight * torch.sigmoid(-above)
    bad = undesirable_weight * torch.sigmoid(above)
    return torch.where(desirable > 0, good, bad)
