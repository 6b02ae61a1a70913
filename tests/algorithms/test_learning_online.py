"""Every online algorithm of the registry learns, through the whole loop, on real models.

What is measured are questions that are never trained on, and what must be reached is stated. Tokens
are few and models tiny, so each run takes seconds.
"""

import copy
import random
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from algorithms.algorithm import load_algorithm
from algorithms.batch import Normalizer
from algorithms.data.chat import ChatFormat
from algorithms.loop import Loop, run
from algorithms.protocols import Workers
from algorithms.rollout.collector import Collector
from algorithms.rollout.questions import Questions
from algorithms.rollout.source import EpisodeSource
from service.spec import (
    JobContext,
    JobSpec,
    PolicyGradientSpec,
    ResolvedModel,
    SftSpec,
    algorithm_specs,
)
from tests.algorithms.divisors import (
    MAX_LENGTH,
    NUMBERS,
    answers_with_any_digit,
    batch_of,
    divisors_tokenizer,
)
from tests.algorithms.letters import Letters, LettersConfig
from tests.algorithms.tiny_policy import EventList, TinyPolicy, tiny_model
from tests.algorithms.tiny_workers import tiny_workers

pytestmark = pytest.mark.long

SEEDS = (0, 1, 2)
STEPS = 18
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    # Without a ratio, samples must be the policy's own; without a group, questions are many.
    "remax": {"mini_batches": 1, "group_size": 1},
    # The advantages of a critic that knows nothing are noise.
    "ppo": {"value_model": {"learning_rate": 0.003, "warmup_steps": 6}},
}
MORE_STEPS = {"remax": 30, "ppo": 26}


COMMON: Mapping[str, Any] = {"mini_batches": 2, "group_size": 4}
"""Small groups, and updates of which only the first is on-policy."""
ALGORITHMS = [
    {"type": name, **COMMON, **SETTINGS.get(name, {})}
    for name, spec in algorithm_specs().items()
    if issubclass(spec, PolicyGradientSpec)
]
OPTIONS: Sequence[Mapping[str, Any]] = [
    {"type": "gspo", **COMMON, "token_level": True},
    {"type": "rloo", **COMMON, "ratio": "token"},
    {"type": "reinforce_plus_plus", **COMMON, "baseline": "group"},
    {"type": "grpo", **COMMON, "kl_coef": 0.01, "rollout_correction": {"level": "sequence"}},
]
"""Those that change how an algorithm learns; one seed each."""


def _named(algorithm: Mapping[str, Any]) -> str:
    usual = {"type", *COMMON, *SETTINGS.get(algorithm["type"], {})}
    options = (name for name in algorithm if name not in usual)
    return "-".join([algorithm["type"], *options])


def _context(spec: Mapping[str, Any]) -> JobContext:
    return JobContext(
        job_id="job-1",
        spec=JobSpec.model_validate({"name": "learning", "model": {"path": "/model"}, **spec}),
        dp=1,
        model=ResolvedModel(kind="random", config={}, tokenizer="/model"),
        files={},
    )


@cache
def _start(seed: int) -> tuple[PreTrainedTokenizerFast, Any]:
    tokenizer = divisors_tokenizer()
    return tokenizer, answers_with_any_digit(tokenizer, seed)


def _held_out_rewards(algorithm: Mapping[str, Any], seed: int, folder: Path) -> Sequence[float]:
    """Mean rewards of sampled answers to 40 questions, before and after."""
    tokenizer, model = _start(seed)
    context = _context(
        {
            "algorithm": algorithm,
            "environment": {"id": "reasoning_gym/gcd", "config": NUMBERS, "seed": seed + 5},
            "rollout": {"max_new_tokens": 3},
            "optimizer": {"learning_rate": 0.003},
            "training": {
                "steps": MORE_STEPS.get(algorithm["type"], STEPS),
                "global_batch_size": 48,
                "max_length": MAX_LENGTH,
                "seed": seed,
            },
            "evaluation": {"items": 40, "modes": ["sampled"]},
        }
    )
    folder.mkdir()
    workers, recorder = tiny_workers(context, copy.deepcopy(model), tokenizer, folder), EventList()
    run(context, workers, tokenizer, recorder)
    # A13: trainer and generator compute the same function, at every step.
    deviations = [m.get("rollout_ratio_deviation", 0.0) for m in recorder.of("metrics")]
    assert max(deviations) < 1e-4
    return [evaluation["reward_mean"] for evaluation in recorder.of("evaluation")]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=_named)
def test_the_reward_rises_on_questions_of_reasoning_gym(
    algorithm: Mapping[str, Any], tmp_path: Path
) -> None:
    """By 0.15 with each seed; from below 0.15 to above 0.45 on average."""
    rewards = [_held_out_rewards(algorithm, seed, tmp_path / str(seed)) for seed in SEEDS]
    before, after = zip(*rewards, strict=True)
    assert statistics.fmean(before) < 0.15
    assert statistics.fmean(after) > 0.45
    assert all(last > first + 0.15 for first, last in rewards)


@pytest.mark.parametrize("algorithm", OPTIONS, ids=_named)
def test_the_reward_rises_with_each_option(algorithm: Mapping[str, Any], tmp_path: Path) -> None:
    before, after = _held_out_rewards(algorithm, SEEDS[0], tmp_path / "0")
    assert before < 0.15
    assert after > 0.45


def _writes_a_or_b(tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
    """A tiny model that was fine-tuned to answer with four times a or four times b, at random."""
    draw, model = random.Random(seed), tiny_model(len(tokenizer), seed)
    chat = ChatFormat(tokenizer)
    policy = TinyPolicy(model, load_algorithm(SftSpec()), stop_id=chat.end_of_turn_id)
    prompt = chat.prompt([{"role": "user", "content": "a"}])
    for _ in range(60):
        texts = [draw.choice(("aaaa", "bbbb")) for _ in range(16)]
        written = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        batch = batch_of([(prompt, [*answer, chat.end_of_turn_id]) for answer in written])
        policy.train_step(batch, Normalizer.of(batch), learning_rate=0.01)
    return model


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_s_critic_explains_the_return_and_the_policy_learns_from_it(
    seed: int, tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    """An answer earns its share of a, so its first letter tells all, and nothing tells before.

    A perfect critic explains four fifths of what the five tokens earn. While the policy stands
    still, ours must come to explain a half, which it has not seen; then the policy learns by it.
    """
    alone, together = 20, 12
    context = _context(
        {
            "algorithm": {
                "type": "ppo",
                "kl_coef": 0.0,
                "mini_batches": 2,
                "value_model": {"learning_rate": 0.003, "warmup_steps": alone},
            },
            "environment": {"id": "test/letters"},
            "rollout": {"max_new_tokens": 6},
            "optimizer": {"learning_rate": 0.003},
            "training": {"steps": alone + together, "global_batch_size": 32, "seed": seed},
        }
    )
    recorder = EventList()
    model = _writes_a_or_b(chatml, seed)
    _letters_loop(context, tiny_workers(context, model, chatml, tmp_path), chatml, recorder).run()
    metrics = recorder.of("metrics")
    explained = [m["explained_variance"] for m in metrics[:alone]]
    rewards = [m["reward_mean"] for m in metrics]
    assert explained[-1] > explained[0]
    assert statistics.fmean(explained[-5:]) > 0.5
    assert 0.3 < statistics.fmean(rewards[:alone]) < 0.7
    assert statistics.fmean(rewards[-3:]) > 0.9


def _letters_loop(
    context: JobContext, workers: Workers, tokenizer: PreTrainedTokenizerFast, recorder: EventList
) -> Loop:
    assert workers.generator is not None
    chat, environment, config = ChatFormat(tokenizer), Letters(), LettersConfig()
    collector = Collector(
        environment=environment,
        config=config,
        max_turns=1,
        generator=workers.generator,
        chat=chat,
        max_new_tokens=context.spec.rollout.max_new_tokens,
        timeout_seconds=60.0,
    )
    questions = Questions(environment, config, seed=context.spec.training.seed)
    return Loop(
        context=context,
        workers=workers,
        recorder=recorder,
        algorithm=load_algorithm(context.spec.algorithm),
        source=EpisodeSource(context, chat, collector, questions),
        evaluator=None,
        validation=None,
        padding_id=chat.padding_id,
    )
