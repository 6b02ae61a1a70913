"""On-policy distillation: what it asks the teacher, and the loss of a batch."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, LossOutput, Normalizer, PolicyOutputs
from algorithms.distillation import Distillation
from algorithms.losses.distillation import divergence, outcomes
from algorithms.protocols import Workers
from service.spec.algorithms.distillation import DIVERGENCES, DistillationSpec

VOCABULARY = 9


def spec(**fields: object) -> DistillationSpec:
    return DistillationSpec.model_validate(
        {"teacher_model": {"source": {"path": "t"}}, "top_k": 4, **fields}
    )


def rows(lengths: tuple[int, ...] = (5, 2, 4)) -> Batch:
    """Rows of which all but the first two tokens are trained; of the second, so, none."""
    places = torch.arange(max(lengths))
    ends = torch.tensor(lengths).unsqueeze(1)
    draw = torch.Generator().manual_seed(3)
    return Batch(
        tokens=torch.randint(0, VOCABULARY, (len(lengths), max(lengths)), generator=draw),
        lengths=ends.squeeze(1),
        loss_mask=((places >= 2) & (places < ends)).float(),
    )


class TableTeacher:
    """A teacher that knows one distribution for each place of a row."""

    def __init__(self, batch: Batch) -> None:
        draw = torch.Generator().manual_seed(1)
        logits = torch.randn(*batch.tokens.shape, VOCABULARY, generator=draw)
        self.log_probs = (2 * logits).log_softmax(-1)
        self.asked: list[int] = []

    def likeliest(self, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
        self.asked.append(count)
        values, ids = self.log_probs.sort(-1, descending=True)
        nothing = (batch.loss_mask == 0).unsqueeze(-1)
        kept = min(count, VOCABULARY)
        return (
            ids[..., :kept].masked_fill(nothing, 0),
            values[..., :kept].masked_fill(nothing, 0.0),
        )


def workers(teacher: TableTeacher | None) -> Workers:
    """Nothing but a teacher is asked for anything."""
    return Workers(train=None, generator=None, checkpoints=None, teacher=teacher)  # type: ignore[arg-type]


def said(batch: Batch, logits: Tensor) -> PolicyOutputs:
    """What a student with these logits says, as the workers would."""
    everything = logits.log_softmax(-1)
    mask = batch.loss_mask
    log_probs = everything.gather(-1, batch.tokens.unsqueeze(-1)).squeeze(-1) * mask
    candidates = everything.gather(-1, batch.candidates["candidate_ids"]) * mask.unsqueeze(-1)
    entropy = -(everything.exp() * everything).sum(-1) * mask
    return PolicyOutputs(log_probs=log_probs, entropy=entropy, candidate_log_probs=candidates)


def student(batch: Batch) -> Tensor:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(*batch.tokens.shape, VOCABULARY, generator=draw).requires_grad_()


def loss(
    batch: Batch, logits: Tensor, normalizer: Normalizer | None = None, **fields: object
) -> LossOutput:
    algorithm = Distillation(spec(**fields))
    return algorithm.loss(said(batch, logits), batch, normalizer or Normalizer.of(batch))


def test_the_teachers_likeliest_tokens_become_the_candidates() -> None:
    batch = rows()
    teacher = TableTeacher(batch)
    algorithm = load_algorithm(spec(top_k=3))
    assert isinstance(algorithm, Distillation)
    assert not DistillationSpec.learns_from_rewards
    assert not algorithm.needs_old_log_probs
    prepared = algorithm.prepare(batch, workers(teacher))
    assert teacher.asked == [3]
    ids, log_probs = teacher.likeliest(batch, 3)
    assert torch.equal(prepared.candidates["candidate_ids"], ids)
    assert torch.equal(prepared.candidates["teacher_log_probs"], log_probs)
    assert torch.equal(prepared.tokens, batch.tokens)
    with pytest.raises(ValueError, match="needs workers with a teacher"):
        algorithm.prepare(batch, workers(None))


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_the_loss_is_the_mean_of_the_trained_tokens(kind: str) -> None:
    batch = rows()
    teacher = TableTeacher(batch)
    batch = Distillation(spec()).prepare(batch, workers(teacher))
    logits = student(batch)
    output = loss(batch, logits, divergence=kind, js_beta=0.3)
    trained = batch.loss_mask > 0
    ids = batch.candidates["candidate_ids"][trained]
    each = divergence(
        outcomes(teacher.log_probs[trained].gather(-1, ids)),
        outcomes(logits[trained].log_softmax(-1).gather(-1, ids)),
        kind,  # type: ignore[arg-type]
        js_beta=0.3,
    )
    assert len(each) == 5
    torch.testing.assert_close(output.loss, each.mean())
    ours, theirs = (torch.autograd.grad(v, logits)[0] for v in (output.loss, each.mean()))
    torch.testing.assert_close(ours, theirs)
    total, count = output.sums[kind.replace("-", "_")]
    assert total / count == pytest.approx(each.mean().item())


def test_the_metrics() -> None:
    batch = rows()
    teacher = TableTeacher(batch)
    batch = Distillation(spec()).prepare(batch, workers(teacher))
    logits = student(batch)
    exact = said(batch, logits)
    batch = batch.with_per_token(rollout_log_probs=exact.log_probs.detach() - math.log(2.0))
    sums = loss(batch, logits).sums
    trained = batch.loss_mask > 0
    mass = teacher.log_probs.exp().sort(-1, descending=True).values[trained][:, :4].sum()
    assert sums["teacher_top_mass"] == pytest.approx((mass.item(), 5.0))
    assert exact.candidate_log_probs is not None
    mass = exact.candidate_log_probs[trained].exp().sum()
    assert sums["student_top_mass"] == pytest.approx((mass.item(), 5.0))
    assert sums["entropy"] == pytest.approx((exact.entropy.sum().item(), 5.0))
    assert sums["rollout_ratio_deviation"] == pytest.approx((2.0, 2.0), abs=1e-5)  # r = 2
    for name, (_, count) in sums.items():
        assert count == (2.0 if name == "rollout_ratio_deviation" else 5.0), name


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_a01_any_split_into_micro_batches_gives_the_same(kind: str, aggregation: str) -> None:
    batch = rows()
    batch = Distillation(spec()).prepare(batch, workers(TableTeacher(batch)))
    logits, normalizer = student(batch), Normalizer.of(batch)
    fields = {"divergence": kind, "loss_aggregation": aggregation}
    whole = loss(batch, logits, **fields)
    parts = [
        loss(batch.rows(slice(row, row + 1)), logits[row : row + 1], normalizer, **fields)
        for row in range(len(batch))
    ]
    split = torch.stack([part.loss for part in parts]).sum()
    torch.testing.assert_close(split, whole.loss, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(value, logits)[0] for value in (split, whole.loss))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_what_is_masked_may_be_anything_and_changes_nothing(kind: str) -> None:
    batch = rows()
    batch = Distillation(spec()).prepare(batch, workers(TableTeacher(batch)))
    logits = student(batch)
    clean = loss(batch, logits, divergence=kind)
    nothing = (batch.loss_mask == 0).unsqueeze(-1)
    outputs = said(batch, logits)
    assert outputs.candidate_log_probs is not None
    dirty = replace(
        outputs,
        candidate_log_probs=outputs.candidate_log_probs.masked_fill(nothing, math.nan),
        log_probs=outputs.log_probs.masked_fill(nothing.squeeze(-1), math.inf),
    )
    teacher = batch.candidates["teacher_log_probs"].masked_fill(nothing, math.nan)
    candidates = {**batch.candidates, "teacher_log_probs": teacher}
    found = Distillation(spec(divergence=kind)).loss(
        dirty, replace(batch, candidates=candidates), Normalizer.of(batch)
    )
    assert found.loss.item() == clean.loss.item()
    assert found.sums == clean.sums
    ours, theirs = (torch.autograd.grad(v.loss, logits)[0] for v in (found, clean))
    assert torch.equal(ours, theirs)


def test_a28_a_micro_batch_with_nothing_to_train_adds_zero_to_sum_and_count() -> None:
    batch = rows((2, 2))
    batch = Distillation(spec()).prepare(batch, workers(TableTeacher(batch)))
    logits = student(batch)
    output = loss(batch, logits)
    assert output.loss.item() == 0.0
    assert set(output.sums.values()) == {(0.0, 0.0)}
    (gradient,) = torch.autograd.grad(output.loss, logits)
    assert not gradient.any()
