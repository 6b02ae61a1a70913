"""One step's data for any algorithm, by the facts that its spec states.

What other models say of a row is a function of its tokens, so that it goes where the row goes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from algorithms.algorithm import Algorithm, load_algorithm
from algorithms.batch import Batch
from algorithms.phases import PhaseClock
from algorithms.prepare import Prepared, prepare
from algorithms.protocols import Workers
from algorithms.samples import Rollout, Samples
from service.spec import AlgorithmSpec, JobSpec
from service.spec.algorithm import RowKind
from service.spec.parts import DataSpec, EnvironmentRef, ModelSource, TrainingSpec
from tests.megatron_backend.training.training_runs import random_batch

VOCABULARY = 101
ROWS = 9
UNITS: dict[RowKind, int] = {"conversation": 1, "preference": 2, "label": 1}
SILENT = 4
"""The row of which nothing is trained: it has no answer, or could not be scored."""


def noise(batch: Batch, seed: float) -> Tensor:
    """[B, T] float64 in [-1, 1], by each token and those before it."""
    prefix = batch.tokens.double().cumsum(dim=1)
    return torch.sin(seed + 12.9898 * batch.tokens + 78.233 * prefix)


@dataclass(frozen=True)
class MadeUpModels:
    """All models that are asked about a batch: policy, reference, critic and teacher."""

    def log_probs(
        self, batch: Batch, *, model: Literal["policy", "reference"] = "policy"
    ) -> Tensor:
        """[B, T], as likely as what the small models of these tests say; less by the reference."""
        mean, seed = {"policy": (-5.0, 1.0), "reference": (-5.3, 2.0)}[model]
        return ((mean + 0.5 * noise(batch, seed)) * batch.loss_mask).float()

    def values(self, batch: Batch) -> Tensor:
        """[B, T] of a critic."""
        return (noise(batch, 3.0) * batch.loss_mask).float()

    def likeliest(self, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
        """[B, T, K] of a teacher: each token is less likely than the one before it."""
        places = torch.arange(min(count, VOCABULARY - 1))
        slopes = (1.5 + noise(batch, 4.0)).unsqueeze(2)
        trained = (batch.loss_mask > 0).unsqueeze(2)
        log_probs = log_softmax(-slopes * torch.arange(len(places) + 1), dim=2)[..., :-1]
        ids = (batch.tokens.unsqueeze(2) + 3 * places) % VOCABULARY
        return ids * trained, (log_probs * trained).float()


def workers(spec: AlgorithmSpec) -> Workers:
    """The models that a job of this spec has."""
    models = cast(Any, MadeUpModels())
    return Workers(
        train=models,
        generator=None,
        checkpoints=models,
        critic=None if spec.critic is None else models,
        teacher=None if spec.teacher is None else models,
    )


def block(spec: AlgorithmSpec) -> int:
    """Rows that belong together: a unit, or the answers to one question."""
    return spec.samples_per_prompt if spec.online else UNITS[spec.rows]


def samples(spec: AlgorithmSpec) -> Samples:
    """Rows of different lengths, of which some tokens in the middle and one row are not trained."""
    rows = ROWS // block(spec) * block(spec)
    batch = random_batch(rows, vocab=VOCABULARY)
    mask = batch.loss_mask.clone()
    mask[::3, 9] = 0.0
    mask[SILENT] = 0.0
    batch = replace(batch, loss_mask=mask, per_token={})
    generator = torch.Generator().manual_seed(5)
    if not spec.online:
        per_row: Mapping[RowKind, dict[str, Tensor]] = {
            "conversation": {},
            "preference": {"margin": torch.rand(rows, generator=generator)},
            "label": {"desirable": (torch.arange(rows) % 3 > 0).float()},
        }
        batch = replace(batch.with_per_sequence(**per_row[spec.rows]), unit=UNITS[spec.rows])
        return Samples(batch=batch, metrics={})
    sampled = MadeUpModels().log_probs(batch).double() + 0.1 * noise(batch, 6.0) * mask
    batch = batch.with_per_token(rollout_log_probs=sampled.float())
    rollout = Rollout(
        batch=batch,
        rewards=torch.zeros_like(mask, dtype=torch.float64),
        scored=torch.arange(rows) != SILENT,
        group_size=spec.samples_per_prompt,
    )
    rewards = rollout.rewards.clone()
    earned = torch.randn(2, rows, generator=generator, dtype=torch.float64)
    rewards[torch.arange(rows), rollout.last] = earned[0]
    rewards[:, 8] += 0.1 * earned[1] * mask[:, 8]
    rollout = replace(rollout, rewards=rewards)
    if spec.greedy_baseline:
        questions = torch.randn(rows // rollout.group_size, generator=generator).double()
        rollout = replace(rollout, baselines=questions.repeat_interleave(rollout.group_size))
    return Samples(batch=batch, rollout=rollout, metrics={})


def reordered(samples: Samples, index: Tensor) -> Samples:
    """The same rows in another order."""
    batch, rollout = samples.batch.rows(index), samples.rollout
    if rollout is None:
        return replace(samples, batch=batch)
    rollout = replace(
        rollout,
        batch=batch,
        rewards=rollout.rewards[index],
        scored=rollout.scored[index],
        baselines=None if rollout.baselines is None else rollout.baselines[index],
    )
    return replace(samples, batch=batch, rollout=rollout)


def other_order(spec: AlgorithmSpec, rows: int) -> Tensor:
    """[rows]: the last unit, or group, first; no rotation, so that neighbours change too."""
    size = block(spec)
    blocks = torch.arange(rows // size).flip(0)
    return (blocks.unsqueeze(1) * size + torch.arange(size)).flatten()


def prepared(spec: AlgorithmSpec, drawn: Samples) -> tuple[Algorithm, Prepared]:
    """What a job of this spec trains on, made as the loop makes it."""
    job = JobSpec(
        name="made-up",
        model=ModelSource(path="/model"),
        algorithm=spec,
        environment=EnvironmentRef(id="tools/calculator") if spec.online else None,
        data=None if spec.online else DataSpec(train="/rows.jsonl"),
        training=TrainingSpec(steps=1),
    )
    algorithm = load_algorithm(spec)
    return algorithm, prepare(drawn, job, algorithm, workers(spec), PhaseClock())
