"""Divergences from a teacher: by hand, against torch's kl_div in fp64, and against TRL's values."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from algorithms.losses.distillation import REST_FLOOR, divergence, outcomes
from service.spec.algorithms.distillation import DIVERGENCES, Divergence

# The values of the 6 tokens of `logits`, norm of the gradient, and the gradient's sum weighted by
# 0, 1, 2, ..., by TRL 1.16.0's generalized_jsd_loss (its beta 0, 1, 0.5, 0.1) at temperature 0.7.
TRL: dict[tuple[Divergence, float], tuple[list[float], float, float]] = {
    ("forward-kl", 0.5): (
        [2.706057946, 0.784181041, 2.208249500, 2.805332905, 1.209437211, 1.709819549],
        3.142171395,
        2.426508581,
    ),
    ("reverse-kl", 0.5): (
        [4.628291940, 1.675924540, 2.694291127, 6.258981279, 1.005207623, 2.698972518],
        3.757177437,
        5.742907525,
    ),
    ("js", 0.5): (
        [0.543850598, 0.225806288, 0.457871310, 0.567612014, 0.178873265, 0.314673800],
        0.371533920,
        0.753967491,
    ),
    ("js", 0.1): (
        [0.215911986, 0.071719935, 0.180789467, 0.223523458, 0.083220516, 0.133438408],
        0.192634233,
        0.255843081,
    ),
}


def logits() -> tuple[Tensor, Tensor]:
    """Student's, with gradient, and teacher's [2, 3, 7]."""
    draw = np.random.RandomState(7)
    student = torch.tensor(draw.normal(size=(2, 3, 7)))
    return student.requires_grad_(), torch.tensor(2 * draw.normal(size=(2, 3, 7)))


def likeliest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probs of a teacher's likeliest tokens."""
    log_probs, ids = values.log_softmax(-1).sort(-1, descending=True)
    return ids[..., :count], log_probs[..., :count]


def of_outcomes(values: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of `ids` and of all others as one, by adding up what is told together."""
    others = values.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([values.gather(-1, ids), others], -1).log_softmax(-1)


def by_torch(teacher: Tensor, student: Tensor, kind: Divergence, beta: float) -> Tensor:
    """The same from torch.nn.functional.kl_div, which takes its arguments the other way round."""

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return kl_div(other, one, reduction="none", log_target=True).sum(-1)

    if kind == "forward-kl":
        return kl(teacher, student)
    if kind == "reverse-kl":
        return kl(student, teacher)
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


@pytest.mark.parametrize(
    ("kind", "value"), [("forward-kl", 0.173287), ("reverse-kl", 0.173287), ("js", 0.042475)]
)
def test_two_candidates_and_a_rest_by_hand(kind: Divergence, value: float) -> None:
    """P = (1/2, 1/4, rest 1/4), Q = (1/4, 1/2, rest 1/4): KL = ln(2) / 4; with M = (3/8, 3/8, 1/4)
    KL(P || M) = ln(4/3) / 2 + ln(2/3) / 4, and KL(Q || M) is the same."""
    teacher, student = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    found = divergence(outcomes(teacher), outcomes(student), kind, js_beta=0.5)
    assert found.item() == pytest.approx(value, abs=1e-6)


def test_gradients_by_hand_with_a_rest() -> None:
    """With r the rest: d forward / d log q_k = -p_k + p_r q_k / q_r, and
    d reverse / d log q_k = q_k ((log q_k - log p_k) - (log q_r - log p_r))."""
    teacher = torch.tensor([0.5, 0.25], dtype=torch.float64).log()
    for kind, by_hand in (
        ("forward-kl", [-0.5 + 0.25 * 0.2 / 0.7, -0.25 + 0.25 * 0.1 / 0.7]),
        (
            "reverse-kl",
            [0.2 * (math.log(0.4) - math.log(2.8)), 0.1 * (math.log(0.4) - math.log(2.8))],
        ),
    ):
        student = torch.tensor([0.2, 0.1], dtype=torch.float64).log().requires_grad_()
        divergence(outcomes(teacher), outcomes(student), kind, js_beta=0.5).backward()
        torch.testing.assert_close(student.grad, torch.tensor(by_hand, dtype=torch.float64))


@pytest.mark.parametrize(("kind", "beta"), list(TRL))
def test_the_whole_vocabulary_as_trl_has_it(kind: Divergence, beta: float) -> None:
    values, norm, weighted = TRL[kind, beta]
    student, teacher = logits()
    ids, log_probs = likeliest(teacher / 0.7, 7)
    said = (student / 0.7).log_softmax(-1).gather(-1, ids)
    found = divergence(outcomes(log_probs), outcomes(said), kind, js_beta=beta)
    assert found.flatten().tolist() == pytest.approx(values, abs=1e-9)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert gradient.norm().item() == pytest.approx(norm, abs=1e-9)
    assert (gradient.flatten() * torch.arange(42)).sum().item() == pytest.approx(weighted, abs=1e-8)


@pytest.mark.parametrize("count", [1, 3, 6, 7])
@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_values_and_gradients_equal_those_of_torch(
    kind: Divergence, beta: float, count: int
) -> None:
    student, teacher = logits()
    ids, log_probs = likeliest(teacher, count)
    said = student.log_softmax(-1).gather(-1, ids)
    found = divergence(outcomes(log_probs), outcomes(said), kind, js_beta=beta)
    if count < 7:
        exact = by_torch(of_outcomes(teacher, ids), of_outcomes(student, ids), kind, beta)
    else:
        exact = by_torch(teacher.log_softmax(-1), student.log_softmax(-1), kind, beta)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(value.sum(), student)[0] for value in (found, exact))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_more_candidates_only_raise_a_divergence_up_to_the_whole(kind: Divergence) -> None:
    student, teacher = logits()
    found = []
    for count in range(1, 8):
        ids, log_probs = likeliest(teacher, count)
        said = student.detach().log_softmax(-1).gather(-1, ids)
        found.append(divergence(outcomes(log_probs), outcomes(said), kind, js_beta=0.5))
    for fewer, more in pairwise(found):
        assert (fewer <= more + 1e-12).all()
    assert (found[0] < found[-1]).all()


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_rest_of_nothing_adds_nothing_in_float32(kind: Divergence) -> None:
    """Of a whole vocabulary of 5,000 in float32 the rest is rounding: value and gradient are those
    without a rest, and equal distributions are 0 apart with no gradient."""
    torch.manual_seed(1)
    student = (3 * torch.randn(4, 5000)).requires_grad_()
    teacher = 3 * torch.randn(4, 5000)
    exact = by_torch(teacher.double().log_softmax(-1), student.double().log_softmax(-1), kind, 0.5)
    (theirs,) = torch.autograd.grad(exact.sum(), student)
    said = student.log_softmax(-1)
    found = divergence(outcomes(teacher.log_softmax(-1)), outcomes(said), kind, js_beta=0.5)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)
    (ours,) = torch.autograd.grad(found.sum(), student, retain_graph=True)
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    same = divergence(outcomes(said.detach()), outcomes(said), kind, js_beta=0.5)
    (gradient,) = torch.autograd.grad(same.sum(), student)
    torch.testing.assert_close(same, torch.zeros_like(same), rtol=0, atol=1e-9)
    assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("sure", ["teacher", "student", "both"])
def test_one_that_is_quite_sure_stays_finite(kind: Divergence, sure: str) -> None:
    """What is left of it is 0 in float32, where the other may have half of it left."""
    certain, even = torch.tensor([0.0, -40.0]), torch.tensor([0.25, 0.25]).log()
    teacher = certain if sure != "student" else even
    student = (certain if sure != "teacher" else even).clone().requires_grad_()
    found = divergence(outcomes(teacher), outcomes(student), kind, js_beta=0.5)
    found.backward()
    assert 0 <= found.item() < -math.log(REST_FLOOR) + 40
    assert student.grad is not None
    assert student.grad.isfinite().all()
