"""KL estimates, importance weights, controllers and penalties are the references'."""

import numpy as np
import pytest
import torch

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch
from algorithms.losses.divergence import LOG_RATIO_BOUND, estimate_kl
from algorithms.losses.mismatch import correction_weights
from algorithms.ppo import Ppo
from algorithms.samples import Rollout
from megatron_backend.training.log_probs import Vocabulary, linear_log_probs
from service.spec import AdaptiveKl, OverlongPenalty, PpoSpec, RemaxSpec, RolloutCorrection
from tests.parity.batches import KL_SEEN, VOCABULARY
from tests.parity.cases import CORRECTIONS, KL, OVERLONG
from tests.parity.expected import Expected, agree, expected, parameters
from tests.parity.ours import aligned, batch_of, unaligned

CAP = 10.0
"""verl's k3, and each of OpenRLHF's estimates, is cut to +-10."""


@pytest.mark.parametrize(("estimator", "expected"), parameters(KL))
def test_kl_of_each_token_and_its_gradient(estimator: str, expected: Expected) -> None:
    inputs = expected.inputs
    log_probs, mask = aligned(inputs.new).requires_grad_(), aligned(inputs.mask)
    estimates = estimate_kl(log_probs, aligned(inputs.reference), estimator) * mask
    estimates.sum().backward()
    ours, slope = unaligned(estimates), unaligned(log_probs.grad)
    theirs, their_slope = expected.array("estimates"), expected.array("gradient")
    if expected.differs == "kl-cap":
        # Beyond the cap theirs is constant; ours goes on to grow.
        beyond = np.abs(ours) > CAP
        assert beyond.any()
        agree(theirs[beyond], CAP * np.sign(ours[beyond]))
        assert not their_slope[beyond].any()
        theirs, their_slope = np.where(beyond, ours, theirs), np.where(beyond, slope, their_slope)
    if expected.differs == "kl-bound":
        # Ours is constant where the log-ratio is beyond 20.
        log_ratio = (inputs.new - inputs.reference) * inputs.mask
        beyond = np.abs(log_ratio) > LOG_RATIO_BOUND
        assert beyond.any()
        at_bound = LOG_RATIO_BOUND * np.sign(log_ratio[beyond])
        agree(ours[beyond], at_bound if estimator == "k1" else at_bound**2 / 2)
        assert not slope[beyond].any()
        theirs, their_slope = np.where(beyond, ours, theirs), np.where(beyond, slope, their_slope)
    agree(ours, theirs)
    agree(slope, their_slope)


@pytest.mark.parametrize(("correction", "expected"), parameters(CORRECTIONS))
def test_weights_from_the_generator_to_the_trainer(
    correction: RolloutCorrection, expected: Expected
) -> None:
    inputs, batch = expected.inputs, batch_of(expected.inputs)
    weights = correction_weights(aligned(inputs.old), batch, correction) * batch.loss_mask
    agree(unaligned(weights), expected.array("weights"))


@pytest.mark.parametrize("one", expected("kl-controller"), ids=lambda one: one.package)
def test_an_adaptive_coefficient_follows_the_kl(one: Expected) -> None:
    controller = AdaptiveKl(target=6.0, horizon=10_000)
    algorithm = load_algorithm(PpoSpec(kl_coef=0.1, kl_controller=controller))
    assert isinstance(algorithm, Ppo)
    coefficients = []
    for kl in KL_SEEN:
        algorithm.saw_kl(kl, 256)
        coefficients.append(algorithm.kl_coef)
    agree(coefficients, one.array("coefficients"))


@pytest.mark.parametrize(("overlong", "expected"), parameters(OVERLONG))
def test_the_penalty_for_length(overlong: OverlongPenalty, expected: Expected) -> None:
    """By ReMax's advantages: with no reward and no baseline they are the penalty at each token."""
    penalties = expected.array("penalties")
    rows = len(penalties)
    mask = torch.tril(torch.ones(rows, rows + 1))
    mask = torch.stack(
        [(torch.arange(rows + 1) > 0) & (torch.arange(rows + 1) <= n + 1) for n in range(rows)]
    ).float()
    batch = Batch(
        tokens=torch.zeros(rows, rows + 1, dtype=torch.int64),
        lengths=mask.sum(dim=1).long() + 1,
        loss_mask=mask,
    )
    rollout = Rollout(
        batch=batch,
        rewards=torch.zeros(rows, rows + 1),
        scored=torch.ones(rows, dtype=torch.bool),
        baselines=torch.zeros(rows),
    )
    credit = load_algorithm(RemaxSpec(overlong=overlong)).advantages(rollout)
    agree(credit.advantages[:, 1], penalties)


@pytest.mark.parametrize(
    "one", expected("distributions"), ids=lambda one: f"{one.package} {one.inputs.name}"
)
def test_log_probs_and_entropy_of_logits(one: Expected) -> None:
    """Ours are computed in float32, from hidden states; the weight is the identity here."""
    shape = one.inputs.mask.shape
    hidden = torch.tensor(one.inputs.student, dtype=torch.float32).reshape(-1, VOCABULARY)
    asked = torch.full((len(hidden), 1), 3)
    log_probs, entropy = linear_log_probs(
        hidden.requires_grad_(), torch.eye(VOCABULARY), asked, Vocabulary(size=VOCABULARY)
    )
    agree(log_probs.reshape(shape), one.array("log_probs"))
    if "entropy" in one.values:
        entropy.sum().backward()
        agree(entropy.reshape(shape), one.array("entropy"))
        assert hidden.grad is not None
        agree(hidden.grad.reshape(*shape, VOCABULARY), one.array("gradient"))
