"""The updates of one step: which rows each has, who learns in it, and what is said of a fault."""

import math
from itertools import chain
from typing import Any, cast

import pytest
import torch

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, Normalizer
from algorithms.errors import JobFailure
from algorithms.faults import StepGuard, StepRefused
from algorithms.protocols import StepResult, Trial, Workers
from algorithms.update import Updates
from service.spec import JobSpec
from tests.algorithms.tiny_policy import EventList

ROWS = 8


class Engine:
    """Takes every step, and remembers its rows, its counts and its rate; or none, where it is
    broken."""

    def __init__(self) -> None:
        self.taken: list[tuple[list[int], float, float]] = []
        self.broken = False
        self.halves: list[float] = []

    def train_step(
        self,
        batch: Batch,
        normalizer: Normalizer,
        *,
        learning_rate: float,
        norm_limit: float,
        loss_limit: float,
    ) -> StepResult:
        assert norm_limit == loss_limit == math.inf
        loss = math.nan if self.broken else 1.0
        self.taken.append((batch.tokens[:, 0].tolist(), normalizer.tokens, learning_rate))
        return _result(loss)

    def trials(self, batch: Batch, normalizer: Normalizer) -> list[Trial]:
        assert normalizer.tokens == batch.loss_mask.sum()
        return [
            Trial(ranks=f"rank {rank}", result=_result(loss))
            for rank, loss in enumerate(self.halves)
        ]


def _result(loss: float) -> StepResult:
    return StepResult(loss=loss, gradient_norm=loss, metrics={}, finite=math.isfinite(loss))


def _updates(algorithm: dict[str, Any]) -> tuple[Updates, Engine, Engine]:
    spec = JobSpec.model_validate(
        {
            "name": "updates",
            "model": {"path": "/model"},
            "algorithm": {"type": "ppo", **algorithm},
            "environment": {"id": "tools/calculator"},
            "optimizer": {"learning_rate": 0.5},
            "training": {"steps": 4, "global_batch_size": ROWS},
        }
    )
    policy, critic = Engine(), Engine()
    workers = Workers(
        train=cast(Any, policy),
        generator=None,
        checkpoints=cast(Any, None),
        critic=cast(Any, critic),
    )
    updates = Updates(
        spec,
        load_algorithm(spec.algorithm),
        workers,
        StepGuard(spec.faults),
        EventList(),
        total_steps=4,
    )
    return updates, policy, critic


def _batch() -> Batch:
    tokens = torch.arange(ROWS).unsqueeze(1).expand(ROWS, 3)
    mask = torch.zeros(ROWS, 3)
    mask[:, 1] = 1.0
    mask[:2, 2] = 1.0
    return Batch(tokens=tokens, lengths=torch.full((ROWS,), 3), loss_mask=mask)


def test_each_pass_deals_every_row_once_in_an_order_of_the_step() -> None:
    updates, policy, critic = _updates({"updates_per_rollout": 2, "mini_batches": 4})
    updates.take(_batch(), 1)
    parts = [rows for rows, _, _ in policy.taken]
    assert [len(rows) for rows in parts] == [2] * 8
    passes = [list(chain(*parts[:4])), list(chain(*parts[4:]))]
    assert [sorted(rows) for rows in passes] == [list(range(ROWS))] * 2
    assert passes[0] != passes[1]
    # Each is divided by its own counts; the critic has the same ones.
    assert [tokens for _, tokens, _ in policy.taken] == [2 + sum(r < 2 for r in p) for p in parts]
    assert [rows for rows, _, _ in critic.taken] == parts
    again, same, _ = _updates({"updates_per_rollout": 2, "mini_batches": 4})
    again.take(_batch(), 1)
    assert same.taken == policy.taken
    again.take(_batch(), 2)
    assert [rows for rows, _, _ in same.taken[8:]] != parts


def test_a_batch_of_which_nothing_is_trained_moves_no_weight() -> None:
    updates, policy, critic = _updates({"mini_batches": 4})
    batch = _batch()
    batch.loss_mask[:6] = 0.0
    updates.take(batch, 1)
    trained = [sum(row >= 6 for row in rows) for rows, _, _ in policy.taken]
    assert sum(trained) == 2
    assert 0 not in trained
    assert critic.taken == [(rows, n, 1e-5) for rows, n, _ in policy.taken]
    batch.loss_mask.zero_()
    before = len(policy.taken)
    assert updates.take(batch, 2).keys() == {"learning_rate"}
    assert len(policy.taken) == before


def test_only_the_critic_learns_while_it_warms_up() -> None:
    updates, policy, critic = _updates({"value_model": {"warmup_steps": 2, "learning_rate": 0.25}})
    for step in (1, 2):
        assert "loss" not in updates.take(_batch(), step)
    assert (len(policy.taken), len(critic.taken)) == (0, 2)
    assert updates.take(_batch(), 3).keys() >= {"loss", "value_loss", "critic_gradient_norm"}
    assert [rate for _, _, rate in policy.taken] == [0.5]
    assert [rate for _, _, rate in critic.taken] == [0.25] * 3


@pytest.mark.parametrize("of_critic", [False, True])
@pytest.mark.parametrize(
    ("halves", "blamed"), [([1.0, math.nan], "rank 1"), ([math.nan] * 2, ""), ([], "")]
)
def test_who_is_blamed_is_found_by_halves(
    of_critic: bool, halves: list[float], blamed: str
) -> None:
    updates, policy, critic = _updates({})
    sick, well = (critic, policy) if of_critic else (policy, critic)
    sick.broken, sick.halves, well.halves = True, halves, [math.nan, 1.0]
    with pytest.raises(StepRefused) as caught:
        updates.take(_batch(), 3)
    assert caught.value.blamed == blamed


@pytest.mark.parametrize("of_critic", [False, True])
def test_a_fault_names_whose_it_is_and_the_rate_to_lower(of_critic: bool) -> None:
    updates, policy, critic = _updates({})
    (critic if of_critic else policy).broken = True
    with pytest.raises(StepRefused) as caught:
        updates.take(_batch(), 3)
    assert ("step 3 of the critic: " in str(caught.value)) == of_critic
    assert (len(policy.taken), len(critic.taken)) == ((0, 2) if of_critic else (2, 1))
    rate = "algorithm.value_model.learning_rate" if of_critic else "optimizer.learning_rate"
    with pytest.raises(JobFailure, match=f"Lower `{rate}`"):
        StepGuard(JobSpec.model_fields["faults"].default).policy(caught.value)
