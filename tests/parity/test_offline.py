"""Losses on files of rows are those of TRL, OpenRLHF, Liger and verl, with gradients."""

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, LossOutput, Normalizer, Outputs, PolicyOutputs, ValueOutputs
from algorithms.kto import reference_point
from service.spec import AlgorithmSpec
from tests.parity.batches import BATCHES, Array
from tests.parity.cases import (
    CHOSEN_LIKELIHOODS,
    LABELS,
    LIKELIHOODS,
    OF_40_TOKENS,
    PAIRS,
    REWARD_MODELS,
    WITH_LIKELIHOOD,
)
from tests.parity.expected import Expected, agree, expected, parameters
from tests.parity.ours import aligned, batch_of, pair_order, unaligned

BY_TOKEN, BY_ANSWER = CHOSEN_LIKELIHOODS


def _loss(
    spec: AlgorithmSpec, of: Array, batch: Batch, normalizer: Normalizer | None = None
) -> tuple[LossOutput, Tensor]:
    """Of log-probs [B, T], or of scores [B]; and these, with their gradient."""
    parameter = torch.tensor(of, dtype=torch.float64) if of.ndim == 1 else aligned(of)
    parameter.requires_grad_()
    outputs: Outputs
    if of.ndim == 1:
        outputs = ValueOutputs(values=torch.zeros_like(batch.loss_mask), scores=parameter)
    else:
        outputs = PolicyOutputs(log_probs=parameter, entropy=torch.zeros_like(parameter))
    output = load_algorithm(spec).loss(outputs, batch, normalizer or Normalizer.of(batch))
    output.loss.backward()
    return output, parameter


@pytest.mark.parametrize(("spec", "expected"), parameters(LIKELIHOODS))
def test_likelihood(spec: AlgorithmSpec, expected: Expected) -> None:
    output, log_probs = _loss(spec, expected.inputs.new, batch_of(expected.inputs))
    agree(output.loss, expected.array("loss"))
    agree(unaligned(log_probs.grad), expected.array("gradient"))


@pytest.mark.parametrize(("spec", "expected"), parameters(OF_40_TOKENS))
def test_likelihood_of_a_micro_batch_of_a_step_of_40_tokens(
    spec: AlgorithmSpec, expected: Expected
) -> None:
    normalizer = Normalizer(tokens=40.0, sequences=9.0)
    batch = batch_of(expected.inputs)
    output, log_probs = _loss(spec, expected.inputs.new, batch, normalizer)
    agree(output.loss, expected.array("loss"))
    agree(unaligned(log_probs.grad), expected.array("gradient"))


@pytest.mark.parametrize(("spec", "expected"), parameters(REWARD_MODELS))
def test_reward_model(spec: AlgorithmSpec, expected: Expected) -> None:
    inputs, order = expected.inputs, pair_order(expected.inputs)
    output, scores = _loss(spec, inputs.scores[order], batch_of(inputs, pairs=True))
    agree(output.loss, expected.array("loss"))
    agree(scores.grad, expected.array("gradient")[order])


@pytest.mark.parametrize(("spec", "expected"), parameters(PAIRS))
def test_preference(spec: AlgorithmSpec, expected: Expected) -> None:
    inputs, order = expected.inputs, pair_order(expected.inputs)
    output, log_probs = _loss(spec, inputs.new[order], batch_of(inputs, pairs=True))
    agree(output.loss, expected.array("loss"))
    agree(unaligned(log_probs.grad), expected.array("gradient")[order])


@pytest.mark.parametrize(("spec", "one"), parameters(WITH_LIKELIHOOD))
def test_preference_and_likelihood_of_the_chosen_answer(spec: AlgorithmSpec, one: Expected) -> None:
    """The likelihood is a mean over an answer's tokens, then over pairs: OpenRLHF's by sample."""
    inputs, order = one.inputs, pair_order(one.inputs)
    likelihood = _on(BY_ANSWER, inputs.name)
    output, log_probs = _loss(spec, inputs.new[order], batch_of(inputs, pairs=True))
    agree(output.loss, one.array("loss") + likelihood.array("loss"))
    gradient = one.array("gradient") + likelihood.array("gradient")
    agree(unaligned(log_probs.grad), gradient[order])


@pytest.mark.parametrize("name", list(BATCHES))
def test_a_mean_over_all_chosen_tokens_is_another_likelihood(name: str) -> None:
    """TRL's, and OpenRLHF's by token. By hand: each answer's mean weighs by its length there."""
    inputs, count = BATCHES[name], len(BATCHES[name].margins)
    lengths = inputs.mask.sum(axis=1)[:count] * inputs.whole_pairs
    sums = (inputs.new * inputs.mask).sum(axis=1)[:count] * inputs.whole_pairs
    by_token = _on(BY_TOKEN, name)
    agree(by_token.array("loss"), -sums.sum() / lengths.sum())
    by_answer = _on(BY_ANSWER, name)
    means = np.divide(sums, lengths, out=np.zeros_like(sums), where=lengths > 0)
    agree(by_answer.array("loss"), -means.sum() / inputs.whole_pairs.sum())


def _on(case: str, batch: str) -> Expected:
    return next(one for one in expected(case) if one.inputs.name == batch)


@pytest.mark.parametrize(("spec", "expected"), parameters(LABELS))
def test_labels(spec: AlgorithmSpec, expected: Expected) -> None:
    inputs, batch = expected.inputs, batch_of(expected.inputs)
    point = torch.full((len(batch),), expected.values["reference_point"], dtype=torch.float64)
    output, log_probs = _loss(spec, inputs.new, batch.with_per_sequence(reference_point=point))
    agree(output.loss, expected.array("loss"))
    agree(unaligned(log_probs.grad), expected.array("gradient"))


@pytest.mark.parametrize("expected", expected("kto/equal-weights"), ids=lambda one: one.inputs.name)
def test_the_reference_point_of_labels(expected: Expected) -> None:
    """The references were told log-probs of mismatched answers that are below 0, as here."""
    inputs = expected.inputs
    policy, reference = -np.abs(inputs.values), -np.abs(inputs.predicted)
    point = reference_point(aligned(policy - reference), aligned(inputs.mask).float())
    agree(point, expected.array("reference_point"))
