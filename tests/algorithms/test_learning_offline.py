"""The offline algorithms learn: on prompts never trained on, over three seeds each.

Each starts from a model that was fine-tuned on good and bad answers alike, so it prefers neither:
less than half of what it writes is a preferred answer, the rest is the other kind or malformed.
"""

import copy
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import Any, cast

import pytest
from transformers import Qwen2ForCausalLM

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, Normalizer
from algorithms.faults import StepGuard
from algorithms.phases import PhaseClock
from algorithms.prepare import prepare
from algorithms.protocols import Checkpoints, TrainEngine, Workers
from algorithms.samples import Samples
from algorithms.update import Updates
from service.spec import JobSpec
from tests.algorithms import copying
from tests.algorithms.copying import Copying, Prompt, preferred_rate
from tests.algorithms.tiny_policy import EventList, TinyPolicy, TinyValueModel, tiny_model

pytestmark = pytest.mark.slow

SEEDS = (0, 1, 2)
PROMPTS = 32
"""Of one step."""
type Draw = Callable[[Sequence[Prompt], random.Random], Batch]


def _spec(algorithm: dict[str, Any], steps: int, rate: float) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "learning",
            "model": {"path": "/model"},
            "algorithm": algorithm,
            "data": {"train": "file-" + "a" * 16},
            "optimizer": {"learning_rate": rate, "warmup_steps": 5, "schedule": "cosine"},
            "training": {"steps": steps},
        }
    )


def _train(
    spec: JobSpec, engine: TrainEngine, draw: Draw, prompts: Sequence[Prompt], seed: int
) -> None:
    """The driver's own way from samples to updates, for all steps of the spec."""
    algorithm = load_algorithm(spec.algorithm)
    workers = Workers(train=engine, generator=None, checkpoints=cast(Checkpoints, None))
    steps = spec.training.steps or 0
    updates = Updates(
        spec, algorithm, workers, StepGuard(spec.faults), EventList(), total_steps=steps
    )
    answers = random.Random(seed + 100)
    drawn = islice(copying.chosen(prompts, PROMPTS, seed), steps)
    for step, some in enumerate(drawn, start=1):
        samples = Samples(batch=draw(some, answers), metrics={})
        ready = prepare(samples, spec, algorithm, workers, PhaseClock())
        updates.take(ready.batch, step)


@cache
def _undecided(seed: int) -> tuple[Copying, Qwen2ForCausalLM]:
    """A model that answers with either letter."""
    task, model = Copying.split(seed), tiny_model(copying.VOCABULARY, seed)
    spec = _spec({"type": "sft"}, steps=200, rate=0.01)
    policy = TinyPolicy(model, load_algorithm(spec.algorithm), stop_id=copying.STOP)
    _train(spec, policy, copying.mixed, task.train, seed)
    return task, model


def _preference(policy: TinyPolicy, task: Copying) -> float:
    """How much likelier the held-out prompts' preferred answers are: nats, a mean over pairs."""
    batch = copying.pairs(task.held_out, random.Random(7))
    log_probs = (policy.log_probs(batch) * batch.loss_mask).sum(dim=1)
    return float((log_probs[0::2] - log_probs[1::2]).mean())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("algorithm", "rate", "draw"),
    [
        ("dpo", 0.001, copying.pairs),
        ("simpo", 0.001, copying.pairs),
        ("orpo", 0.002, copying.pairs),
        ("kto", 0.002, copying.labelled),
    ],
)
def test_the_preferred_answer_becomes_the_likelier_one_and_is_written(
    algorithm: str, rate: float, draw: Draw, seed: int
) -> None:
    """From less than 0.6 to more than 0.8 of what is sampled, and 3 nats in the margin."""
    task, model = _undecided(seed)
    spec = _spec({"type": algorithm}, steps=30, rate=rate)
    policy = TinyPolicy(copy.deepcopy(model), load_algorithm(spec.algorithm), stop_id=copying.STOP)

    def measure() -> tuple[float, float]:
        policy.sync_weights(0)
        return preferred_rate(policy, task.held_out, answers=4), _preference(policy, task)

    rate_before, margin_before = measure()
    _train(spec, policy, draw, task.train, seed)
    rate_after, margin_after = measure()
    assert 0.3 < rate_before < 0.6
    assert abs(margin_before) < 0.5
    assert rate_after > 0.8
    assert margin_after > margin_before + 3.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reward_model_ranks_pairs_that_it_has_not_seen(seed: int) -> None:
    task, model = _undecided(seed)
    spec = _spec({"type": "reward_model"}, steps=40, rate=0.003)
    value = TinyValueModel(model, load_algorithm(spec.algorithm).loss)
    held_out = copying.pairs(list(task.held_out) * 4, random.Random(7))

    def accuracy() -> float:
        result = value.evaluate_loss(held_out, Normalizer.of(held_out))
        return result.metrics["reward_accuracy"]

    before = accuracy()
    _train(spec, value, copying.pairs, task.train, seed)
    assert before < 0.7
    assert accuracy() >= 0.9
