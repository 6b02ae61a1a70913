"""Rows as steps, and the loss on a file, which is that of one batch however the file is cut."""

import json
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, Normalizer
from algorithms.data.chat import ChatFormat
from algorithms.data.collation import collate
from algorithms.data.dataset import Dataset
from algorithms.data.examples import Example, Item, LabelledExample, Pair
from algorithms.data.source import RowSource, validate
from algorithms.errors import JobFailure
from algorithms.phases import PhaseClock
from algorithms.samples import Samples
from service.spec import (
    DpoSpec,
    JobContext,
    JobSpec,
    OrpoSpec,
    Reason,
    ResolvedModel,
    ResumedCheckpoint,
    SftSpec,
    SimpoSpec,
)
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
    expected = policy.evaluate_loss(whole, Normalizer.of(whole))
    measured = validate(
        policy, Dataset(examples=examples), batch_size=batch_size, padding_id=0, max_length=16
    )
    wanted = {**expected.metrics, "loss": expected.loss}
    assert measured == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def _examples(count: int, seed: int) -> list[Example]:
    draw = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        length = 4 + 3 * index % 7
        tokens = torch.randint(0, 50, (length,), generator=draw, dtype=torch.int32)
        trained = torch.tensor([0, 0] + [1] * (length - 2), dtype=torch.uint8)
        found.append(Example(tokens=tokens, trained=trained))
    return found


def _pairs() -> list[Pair]:
    answers = zip(_examples(5, 1), _examples(5, 2), strict=True)
    return [Pair(chosen=good, rejected=bad) for good, bad in answers]


@pytest.mark.parametrize("spec", [DpoSpec(), SimpoSpec(), OrpoSpec()], ids=lambda s: s.type)
@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_validation_loss_of_pairs(spec: Any, batch_size: int) -> None:
    """5 pairs: the last batch is filled up with whole pairs that count for nothing."""
    policy = TinyPolicy(tiny_model(50), load_algorithm(spec), stop_id=0)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight += 0.02  # else policy and reference are one, and DPO's loss is ln 2 for any pair

    def prepare(samples: Samples) -> Batch:
        reference = policy.log_probs(samples.batch, model="reference")
        return samples.batch.with_per_token(reference_log_probs=reference)

    whole = prepare(Samples(batch=collate(_pairs(), padding_id=0, max_length=16), metrics={}))
    expected = policy.evaluate_loss(whole, Normalizer.of(whole))
    seen: list[int] = []

    def watched(samples: Samples) -> Batch:
        assert samples.rows is not None
        seen.extend(samples.rows)
        assert len(samples.batch) == 2 * batch_size
        return prepare(samples)

    measured = validate(
        policy,
        Dataset(examples=_pairs()),
        batch_size=batch_size,
        padding_id=0,
        max_length=16,
        prepare=watched,
    )
    wanted = {**expected.metrics, "loss": expected.loss}
    assert measured == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert seen == list(range(5))


def _context(algorithm: str, resume: ResumedCheckpoint | None = None) -> JobContext:
    name = "file-0123456789abcdef"
    spec = JobSpec.model_validate(
        {
            "name": "pairs",
            "model": {"path": "tiny"},
            "algorithm": {"type": algorithm},
            "data": {"train": name},
            "training": {"global_batch_size": 2, "epochs": 2, "max_length": 16},
        }
    )
    return JobContext(
        job_id="job-1",
        spec=spec,
        dp=1,
        model=ResolvedModel(kind="random", config={}, tokenizer="t"),
        files={name: "rows"},
        resume=resume,
    )


@pytest.mark.parametrize("kind", ["pairs", "labels"])
def test_a_step_has_so_many_rows_of_the_file(kind: str, chatml: PreTrainedTokenizerFast) -> None:
    """`global_batch_size` counts pairs, not answers, and every row comes once an epoch."""
    items: list[Item] = [*_pairs()]
    if kind == "labels":
        items = [
            LabelledExample(answer=one, desirable=index % 2 == 0)
            for index, one in enumerate(_examples(5, 1))
        ]
    context = _context("dpo" if kind == "pairs" else "kto")
    source = RowSource(context, ChatFormat(chatml), Dataset(examples=items))
    assert source.total_steps == 5  # 2 epochs of 5 rows, 2 a step
    drawn = [source.draw(step, PhaseClock()) for step in range(1, 6)]
    assert [len(samples.batch) for samples in drawn] == [2 * (2 if kind == "pairs" else 1)] * 5
    rows = [row for samples in drawn for row in samples.rows or ()]
    assert sorted(rows[:5]) == sorted(rows[5:]) == list(range(5))
    for samples in drawn:
        assert samples.rows is not None
        same = collate([items[row] for row in samples.rows], padding_id=0, max_length=16)
        width = min(same.tokens.shape[1], samples.batch.tokens.shape[1])
        assert torch.equal(samples.batch.loss_mask[:, :width], same.loss_mask[:, :width])
        assert samples.batch.lengths.tolist() == same.lengths.tolist()


def test_a_job_never_goes_on_in_rows_that_changed(chatml: PreTrainedTokenizerFast) -> None:
    """A file in S3 or on a disk may be another one when the job is started again."""
    chat, rows = ChatFormat(chatml), Dataset(examples=_examples(5, 1))
    source = RowSource(_context("sft"), chat, rows)
    source.draw(1, PhaseClock())
    state = json.loads(json.dumps(source.state()))
    same = RowSource(_context("sft"), chat, Dataset(examples=_examples(5, 1)))
    same.restore(state)
    assert same.draw(2, PhaseClock()).rows == source.draw(2, PhaseClock()).rows
    changed = Dataset(examples=_examples(5, 2))
    with pytest.raises(JobFailure, match="not those that the checkpoint was made with") as caught:
        RowSource(_context("sft"), chat, changed).restore(state)
    assert caught.value.reason is Reason.USER_ERROR
    # What another job has left is compared at submit, and may be cut at another length.
    resumed = ResumedCheckpoint(job="job-0", step=1, checkpoint="/c")
    RowSource(_context("sft", resumed), chat, changed).restore(state)
    RowSource(_context("sft"), chat, changed).restore({"position": 2})
