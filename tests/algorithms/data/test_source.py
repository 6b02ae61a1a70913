"""The loss on a file is the loss of one batch, however the file is cut."""

import pytest
import torch

from algorithms.algorithm import load_algorithm
from algorithms.batch import Normalizer
from algorithms.data.collation import collate
from algorithms.data.dataset import Dataset
from algorithms.data.examples import Example
from algorithms.data.source import validation_loss
from service.spec import SftSpec
from tests.algorithms.tiny_policy import TinyPolicy, tiny_model


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_validation_loss_does_not_depend_on_the_batch_size(
    aggregation: str, batch_size: int
) -> None:
    generator = torch.Generator().manual_seed(4)
    examples = [
        Example(
            tokens=torch.randint(0, 50, (n,), generator=generator, dtype=torch.int32),
            trained=torch.tensor([0] + [1] * (n - 1), dtype=torch.uint8),
        )
        for n in (3, 9, 5, 2, 12)
    ]
    spec = SftSpec.model_validate({"loss_aggregation": aggregation})
    policy = TinyPolicy(tiny_model(50), load_algorithm(spec), stop_id=0)
    whole = collate(examples, padding_id=0, max_length=16)
    expected = policy.evaluate_loss(whole, Normalizer.of(whole)).loss
    measured = validation_loss(
        policy, Dataset(examples=examples), batch_size=batch_size, padding_id=0, max_length=16
    )
    assert measured == pytest.approx(expected, rel=1e-5)
