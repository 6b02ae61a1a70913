"""Divergences from a teacher are TRL's and Liger's generalised Jensen-Shannon divergence."""

from dataclasses import replace

import pytest
import torch

from algorithms.algorithm import load_algorithm
from algorithms.batch import Normalizer, PolicyOutputs
from service.spec import DistillationSpec
from tests.parity.batches import VOCABULARY
from tests.parity.cases import DIVERGENCES
from tests.parity.expected import Expected, agree, parameters
from tests.parity.ours import aligned, batch_of


@pytest.mark.parametrize(("spec", "expected"), parameters(DIVERGENCES))
def test_divergence_and_its_gradient_on_the_students_logits(
    spec: DistillationSpec, expected: Expected
) -> None:
    inputs = expected.inputs
    logits = torch.tensor(inputs.student, dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor(inputs.teacher, dtype=torch.float64).log_softmax(-1)
    places = teacher.topk(min(spec.top_k, VOCABULARY)).indices
    said = logits.log_softmax(-1).gather(-1, places)
    in_front = (0, 0, 1, 0)  # column 0 predicts nothing
    candidates = {
        "candidate_ids": torch.nn.functional.pad(places, in_front),
        "teacher_log_probs": torch.nn.functional.pad(teacher.gather(-1, places), in_front),
    }
    batch = replace(batch_of(inputs), candidates=candidates)
    outputs = PolicyOutputs(
        log_probs=aligned(inputs.new),
        entropy=aligned(inputs.entropy),
        candidate_log_probs=torch.nn.functional.pad(said, in_front),
    )
    output = load_algorithm(spec).loss(outputs, batch, Normalizer.of(batch))
    output.loss.backward()
    agree(output.loss, expected.array("loss"))
    agree(logits.grad, expected.array("gradient"))
