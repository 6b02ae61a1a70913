"""Policy losses, and the critic's, are those of TRL, verl, OpenRLHF and Liger, with gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from algorithms.algorithm import Algorithm, load_algorithm
from algorithms.batch import Batch, LossOutput, Normalizer, PolicyOutputs, ValueOutputs
from service.spec import AlgorithmSpec, PpoSpec
from tests.parity.batches import Inputs
from tests.parity.cases import ENTROPY, LOSSES, TOKEN_ADVANTAGES, VALUES
from tests.parity.expected import Expected, agree, parameters
from tests.parity.ours import aligned, batch_of, unaligned


def _policy_loss(spec: AlgorithmSpec, batch: Batch, inputs: Inputs) -> tuple[LossOutput, Tensor]:
    log_probs = aligned(inputs.new).requires_grad_()
    outputs = PolicyOutputs(log_probs=log_probs, entropy=torch.zeros_like(log_probs))
    output = load_algorithm(spec).loss(outputs, batch, Normalizer.of(batch))
    output.loss.backward()
    return output, log_probs


@pytest.mark.parametrize(("spec", "expected"), parameters(LOSSES))
def test_loss_and_gradient(spec: AlgorithmSpec, expected: Expected) -> None:
    output, log_probs = _policy_loss(spec, batch_of(expected.inputs), expected.inputs)
    loss, gradient = expected.loss_and_gradient()
    agree(output.loss, loss)
    agree(unaligned(log_probs.grad), gradient)


@pytest.mark.parametrize(("spec", "expected"), parameters(TOKEN_ADVANTAGES))
def test_loss_and_gradient_where_each_token_has_its_advantage(
    spec: AlgorithmSpec, expected: Expected
) -> None:
    batch = batch_of(expected.inputs, token_advantages=True)
    output, log_probs = _policy_loss(spec, batch, expected.inputs)
    agree(output.loss, expected.array("loss"))
    agree(unaligned(log_probs.grad), expected.array("gradient"))


@pytest.mark.parametrize(("spec", "expected"), parameters(ENTROPY))
def test_an_entropy_bonus_has_a_gradient_of_its_own(
    spec: AlgorithmSpec, expected: Expected
) -> None:
    batch = batch_of(expected.inputs)
    log_probs = aligned(expected.inputs.new).requires_grad_()
    entropy = aligned(expected.inputs.entropy).requires_grad_()
    outputs = PolicyOutputs(log_probs=log_probs, entropy=entropy)
    output = load_algorithm(spec).loss(outputs, batch, Normalizer.of(batch))
    output.loss.backward()
    loss, gradient = expected.loss_and_gradient()
    agree(output.loss, loss)
    agree(unaligned(log_probs.grad), gradient)
    agree(unaligned(entropy.grad), expected.loss_and_gradient("entropy_gradient")[1])


@pytest.mark.parametrize(("spec", "expected"), parameters(VALUES))
def test_value_loss_and_gradient(spec: PpoSpec, expected: Expected) -> None:
    batch, algorithm = batch_of(expected.inputs), load_algorithm(spec)
    values = aligned(expected.inputs.predicted).requires_grad_()
    outputs = ValueOutputs(values=values, scores=values.sum(dim=1))
    output = algorithm.value_loss(outputs, batch, Normalizer.of(batch))
    output.loss.backward()
    agree(output.loss, expected.array("loss"))
    agree(unaligned(values.grad), expected.array("gradient"))


@pytest.mark.parametrize(("spec", "expected"), parameters(LOSSES, batches=["turns"]))
def test_in_float32_as_a_job_trains(spec: AlgorithmSpec, expected: Expected) -> None:
    batch = batch_of(expected.inputs)
    rounded = {name: values.float() for name, values in batch.per_token.items()}
    log_probs = aligned(expected.inputs.new).float().requires_grad_()
    outputs = PolicyOutputs(log_probs=log_probs, entropy=torch.zeros_like(log_probs))
    batch = replace(batch, per_token=rounded)
    output = load_algorithm(spec).loss(outputs, batch, Normalizer.of(batch))
    output.loss.backward()
    assert output.loss.dtype == torch.float32
    loss, gradient = expected.loss_and_gradient()
    agree(output.loss, loss, tolerance=5e-6)
    agree(unaligned(log_probs.grad), gradient, tolerance=5e-6)


@pytest.mark.parametrize(("spec", "expected"), parameters(LOSSES, batches=["ragged", "empty-rows"]))
def test_a01_the_shares_of_single_rows_add_up_to_it(
    spec: AlgorithmSpec, expected: Expected
) -> None:
    """The mean of a micro-batch is nobody's mean."""
    inputs = expected.inputs
    batch, algorithm = batch_of(inputs), load_algorithm(spec)
    log_probs = aligned(inputs.new).requires_grad_()
    shares = [
        _share(algorithm, batch, log_probs, slice(row, row + 1)) for row in range(len(inputs.mask))
    ]
    torch.stack(shares).sum().backward()
    loss, gradient = expected.loss_and_gradient()
    agree(torch.stack(shares).sum(), loss)
    agree(unaligned(log_probs.grad), gradient)


def _share(algorithm: Algorithm, batch: Batch, log_probs: Tensor, rows: slice) -> Tensor:
    outputs = PolicyOutputs(log_probs=log_probs[rows], entropy=torch.zeros_like(log_probs[rows]))
    return algorithm.loss(outputs, batch.rows(rows), Normalizer.of(batch)).loss
