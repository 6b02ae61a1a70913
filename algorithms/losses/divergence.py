"""Estimates of KL(policy || other) from the policy's own samples.

With d = log p - log q at a sampled token (J. Schulman, "Approximating KL Divergence", 2020):

    k1 = d             unbiased, noisy, may be negative
    k2 = d^2 / 2       biased, low variance
    k3 = e^-d + d - 1  unbiased as a value, never negative

p is the policy that is trained and q the one it is held to: the other way round is another number.
"""

from torch import Tensor

from service.spec.algorithms.policy_gradient import KlEstimator

# exp overflows float32 beyond 88; 20 is far beyond any sane policy, and exp(20) any clip range.
LOG_RATIO_BOUND = 20.0


def estimate_kl(log_probs: Tensor, other_log_probs: Tensor, estimator: KlEstimator) -> Tensor:
    """The named estimate of each token (k3: GRPO, arXiv 2402.03300, eq. 4).

    Args:
        log_probs: [B, T] of the policy p, with or without gradient.
        other_log_probs: [B, T] of q.
        estimator: which.

    Returns:
        [B, T]; k2 and k3 are at least 0.
    """
    difference = (log_probs - other_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2.0
    return (-difference).exp() + difference - 1.0
