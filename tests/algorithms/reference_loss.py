"""The losses of an algorithm on the reference fixture."""

from typing import Any

import torch
from torch import Tensor

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, LossOutput, Normalizer, PolicyOutputs
from service.spec import AlgorithmSpec
from tests.algorithms.reference_fixture import reference_fixture


def loss_of(
    spec: AlgorithmSpec, batch: Batch, log_probs: Tensor, normalizer: Normalizer | None = None
) -> LossOutput:
    """An algorithm's loss where the policy says `log_probs`."""
    outputs = PolicyOutputs(log_probs=log_probs, entropy=torch.ones_like(log_probs))
    return load_algorithm(spec).loss(outputs, batch, normalizer or Normalizer.of(batch))


def value_and_gradient(spec: AlgorithmSpec, **per_token: Any) -> tuple[float, Tensor]:
    """On the fixture, with more tensors of its batch; the gradient is [6, 6]."""
    batch, log_probs = reference_fixture()
    output = loss_of(spec, batch.with_per_token(**per_token), log_probs)
    output.loss.backward()
    assert log_probs.grad is not None
    return float(output.loss.detach()), log_probs.grad
