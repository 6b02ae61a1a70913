"""Steps of episodes: which questions, in which rows, and what a checkpoint must know of them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch
from algorithms.data.chat import ChatFormat, Part
from algorithms.errors import JobFailure
from algorithms.phases import PhaseClock
from algorithms.prepare import prepare
from algorithms.protocols import Completion, Sampling, Workers
from algorithms.rollout.collector import Collector
from algorithms.rollout.questions import Questions
from algorithms.rollout.source import EpisodeSource
from algorithms.samples import Samples
from algorithms.seeds import derive_seed
from service.spec import JobContext, JobSpec, Reason, ResolvedModel
from tests.algorithms.letters import Letters, LettersConfig


class CoinPolicy:
    """Writes `a` (reward 1) or `b` (reward 0), by the seed and the row alone; greedily `b`.

    With `sure` it always writes `a`.
    """

    max_length = 64

    def __init__(self, chat: ChatFormat, *, sure: bool = False) -> None:
        self.calls: list[Sampling] = []
        self.rows: list[int] = []
        self._chat, self._sure = chat, sure

    def sync_weights(self, version: int) -> None:
        raise AssertionError(f"nobody asked for weights {version}")

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        self.calls.append(sampling)
        self.rows.append(len(prompts))
        return [self._write(row, sampling) for row in range(len(prompts))]

    def _write(self, row: int, sampling: Sampling) -> Completion:
        heads = derive_seed(sampling.seed, row) % 2 == 0 and sampling.temperature > 0
        text = "a" if heads or self._sure else "b"
        written = Part(text=text, trained=True, follows_turn=False)
        ids = [*self._chat.tokenize([[written]])[0].token_ids, self._chat.end_of_turn_id]
        return Completion(
            token_ids=ids, log_probs=[-0.7] * len(ids), stop_reason="stop", weight_version=0
        )


class LengthScorer:
    """A reward model that likes a row by its length and its number of `a`."""

    def __init__(self, letter: int) -> None:
        self._letter = letter

    def scores(self, batch: Batch) -> torch.Tensor:
        return 10.0 + ((batch.tokens == self._letter) & (batch.loss_mask > 0)).sum(dim=1).float()


def _context(algorithm: dict[str, Any], *, rows: int, **parts: Any) -> JobContext:
    spec = {
        "name": "test",
        "model": {"path": "/model"},
        "algorithm": algorithm,
        "environment": {"id": "test/letters"},
        "training": {"steps": 100, "global_batch_size": rows},
        **parts,
    }
    return JobContext(
        job_id="job-1",
        spec=JobSpec.model_validate(spec),
        dp=1,
        model=ResolvedModel(kind="random", config={}, tokenizer="/model"),
    )


class Played:
    """A source, and the questions that were played for it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        algorithm: dict[str, Any],
        *,
        rows: int,
        sure: bool = False,
        config: LettersConfig | None = None,
        **parts: Any,
    ) -> None:
        self.chat = ChatFormat(tokenizer)
        self.policy, self.environment = CoinPolicy(self.chat, sure=sure), Letters()
        self.context = _context(algorithm, rows=rows, **parts)
        collector = Collector(
            environment=self.environment,
            config=config or LettersConfig(),
            max_turns=1,
            generator=self.policy,
            chat=self.chat,
            max_new_tokens=8,
            timeout_seconds=5.0,
        )
        questions = Questions(self.environment, config or LettersConfig(), seed=1)
        self.source = EpisodeSource(self.context, self.chat, collector, questions)

    def draw(self, step: int) -> tuple[Samples, list[int]]:
        """A step's samples, and the number of each question in the order of play."""
        before = len(self.environment.opened)
        samples = self.source.draw(step, PhaseClock())
        opened = self.environment.opened[before:]
        return samples, [env._item["number"] for env in opened]


def _order(count: int, config: LettersConfig) -> list[int]:
    items = Letters().items(config, seed=1, count=count)
    return [item["number"] for item in items]


def test_a34_each_question_is_asked_once_an_epoch_and_its_answers_stand_together(
    chatml: PreTrainedTokenizerFast,
) -> None:
    nine = LettersConfig(size=9)
    played = Played(chatml, {"type": "grpo", "group_size": 2}, rows=6, config=nine)
    epochs = []
    for first in (1, 4):
        numbers = []
        for step in range(first, first + 3):
            samples, asked = played.draw(step)
            assert samples.rollout is not None
            assert (len(samples.batch), samples.rollout.group_size) == (6, 2)
            numbers += asked
        assert numbers[::2] == numbers[1::2]  # two rows, side by side
        assert sorted(numbers[::2]) == list(range(9))
        epochs.append(numbers)
    assert epochs[0] == epochs[1]


_WITH_SPREAD = {"type": "grpo", "group_size": 2, "dynamic_sampling": {"max_batches": 6}}


def test_a34_no_question_is_left_out_where_the_number_of_a_step_s_questions_varies(
    chatml: PreTrainedTokenizerFast,
) -> None:
    config = LettersConfig()
    played, done = Played(chatml, _WITH_SPREAD, rows=8), 0
    order, taken = _order(400, config), []
    for step in range(1, 13):
        samples, asked = played.draw(step)
        metrics, rollout = samples.metrics, samples.rollout
        assert rollout is not None
        # What was played for nothing is asked again: the step goes on where the last ended.
        drawn = int(metrics["groups_drawn"])
        assert asked[::2] == order[done : done + drawn]
        next_one = played.source.state()["next_question"]
        assert metrics["groups_masked"] == 0
        assert done + 4 <= next_one <= done + drawn
        taken.append(next_one - done)
        done = next_one
        assert rollout.scored.all()
        groups = rollout.returns.view(4, 2)
        assert bool((groups[:, 0] != groups[:, 1]).all())
        assert metrics["groups_without_spread"] >= taken[-1] - 4
    assert len(set(taken)) > 2  # so the place does not follow from the number of the step


def test_a34_a_resumed_source_asks_what_the_uninterrupted_one_would_have_asked(
    chatml: PreTrainedTokenizerFast,
) -> None:
    whole = Played(chatml, _WITH_SPREAD, rows=8)
    drawn, states = [], []
    for step in range(1, 9):
        drawn.append(whole.draw(step))
        states.append(whole.source.state())
    resumed = Played(chatml, _WITH_SPREAD, rows=8)
    resumed.source.restore(states[4])
    for step in (6, 7, 8):
        samples, numbers = resumed.draw(step)
        before, numbers_before = drawn[step - 1]
        assert numbers == numbers_before
        assert torch.equal(samples.batch.tokens, before.batch.tokens)
        assert samples.metrics == before.metrics
    assert resumed.source.state() == states[-1]


def test_a_state_without_a_place_goes_on_by_the_number_of_the_step(
    chatml: PreTrainedTokenizerFast,
) -> None:
    fields = {"type": "grpo", "group_size": 2}
    whole, old = Played(chatml, fields, rows=4), Played(chatml, fields, rows=4)
    for step in (1, 2):
        whole.draw(step)
    old.source.restore({})
    assert old.draw(3)[1] == whole.draw(3)[1]
    assert old.source.state() == {"next_question": 6}


def test_a32_a_reward_that_is_always_the_same_ends_the_job_where_it_shall(
    chatml: PreTrainedTokenizerFast,
) -> None:
    rule = {"max_batches": 3, "when_short": "fail"}
    algorithm = {"type": "dapo", "group_size": 4, "dynamic_sampling": rule}
    played = Played(chatml, algorithm, rows=16, sure=True)
    with pytest.raises(JobFailure) as caught:
        played.draw(7)
    assert caught.value.reason is Reason.USER_ERROR
    assert "step 7: only 0 of the 4 groups of the step" in str(caught.value)
    assert "after 12 questions in 3 batches" in str(caught.value)
    assert "12 have the best reward in every answer" in str(caught.value)
    assert played.policy.rows == [16, 16, 16]


def test_a32_else_it_trains_on_what_there_is_and_the_batch_keeps_its_size(
    chatml: PreTrainedTokenizerFast,
) -> None:
    algorithm = {"type": "dapo", "group_size": 4, "dynamic_sampling": {"max_batches": 3}}
    played = Played(chatml, algorithm, rows=16, sure=True)
    samples, _ = played.draw(1)
    assert samples.rollout is not None
    assert len(samples.batch) == 16
    assert not samples.rollout.scored.any()
    assert float(samples.batch.loss_mask.sum()) == 0.0
    assert samples.batch is samples.rollout.batch
    counts = ("groups_drawn", "groups_without_spread", "groups_masked", "batches_drawn")
    assert [samples.metrics[name] for name in counts] == [12, 12, 4, 3]
    assert samples.metrics["reward_mean"] == 1.0  # of all that was played
    (warning,) = samples.warnings
    assert "only 0 of the 4 groups" in warning["message"]
    assert "The step trains nothing" in warning["message"]


def test_a32_groups_with_spread_come_first_and_the_rest_is_masked(
    chatml: PreTrainedTokenizerFast,
) -> None:
    rule = {"type": "grpo", "group_size": 2, "dynamic_sampling": {"max_batches": 1}}
    played = Played(chatml, rule, rows=16)
    samples, _ = played.draw(1)
    rollout, masked = samples.rollout, int(samples.metrics["groups_masked"])
    assert rollout is not None
    assert 0 < masked < 8  # the coin fell so
    assert samples.warnings == []  # the metrics tell
    assert masked == samples.metrics["groups_without_spread"]
    trained = 2 * (8 - masked)
    assert rollout.scored.tolist() == [True] * trained + [False] * (16 - trained)
    assert bool((samples.batch.loss_mask.sum(dim=1) > 0).eq(rollout.scored).all())


def test_each_batch_of_a_step_draws_anew(chatml: PreTrainedTokenizerFast) -> None:
    algorithm = {"type": "dapo", "group_size": 4, "dynamic_sampling": {"max_batches": 3}}
    played = Played(chatml, algorithm, rows=8, sure=True)
    for step in (1, 2):
        played.draw(step)
    assert len({sampling.seed for sampling in played.policy.calls}) == 6
    plain = Played(chatml, {"type": "grpo", "group_size": 4}, rows=8)
    plain.draw(1)
    assert plain.policy.calls[0].seed == played.policy.calls[0].seed


def test_a_greedy_baseline_answers_each_question_once(chatml: PreTrainedTokenizerFast) -> None:
    played = Played(chatml, {"type": "remax", "group_size": 3}, rows=6)
    samples, numbers = played.draw(1)
    assert [s.temperature for s in played.policy.calls] == [1.0, 0.0]
    assert played.policy.rows == [6, 2]
    assert numbers[6:] == numbers[:6:3]
    seeds = [env.seed for env in played.environment.opened]
    assert seeds[6:] == seeds[:6:3]  # the environment is the same one
    assert samples.rollout is not None
    assert samples.rollout.baselines is not None
    assert samples.rollout.baselines.tolist() == [0.0] * 6  # greedily it writes `b`
    assert len(samples.batch) == 6  # none of them is trained
    assert samples.metrics["baseline_reward_mean"] == 0.0


def test_a_reward_model_scores_the_greedy_answers_as_well(
    chatml: PreTrainedTokenizerFast,
) -> None:
    reward = {"environment_weight": 2.0, "model": {"source": {"path": "rm"}}, "model_weight": 0.5}
    played = Played(chatml, {"type": "remax", "group_size": 2}, rows=8, reward=reward)
    samples, _ = played.draw(1)
    (letter,) = chatml("a")["input_ids"]
    scorer = LengthScorer(letter)
    seen = {}

    class Watching:
        def log_probs(self, batch: Batch, **_: Any) -> torch.Tensor:
            return torch.zeros_like(batch.loss_mask)

    algorithm = load_algorithm(played.context.spec.algorithm)
    watched = algorithm.advantages

    def advantages(rollout: Any) -> Any:
        seen["rollout"] = rollout
        return watched(rollout)

    algorithm.advantages = advantages  # type: ignore[method-assign]
    workers = Workers(
        train=Watching(),  # type: ignore[arg-type]
        generator=None,
        checkpoints=None,  # type: ignore[arg-type]
        scorer=scorer,
    )
    prepare(samples, played.context.spec, algorithm, workers, PhaseClock())
    # `a` earns 2 x 1 + 0.5 x 11, `b` 0.5 x 10: of sampled and greedy answers alike.
    assert set(seen["rollout"].returns.tolist()) == {7.5, 5.0}
    assert seen["rollout"].baselines.tolist() == [5.0] * 8


def test_a_model_alone_scores_what_the_environment_could_not(
    chatml: PreTrainedTokenizerFast,
) -> None:
    class Silent(Letters):
        def items(self, config: Any, *, seed: int, count: int) -> Any:
            items = super().items(config, seed=seed, count=count)
            return [{**item, "rewards": [None]} for item in items]

    reward = {"environment_weight": 0.0, "model": {"source": {"path": "rm"}}}
    for weight, trained in ((0.0, 4), (1.0, 0)):
        played = Played(
            chatml,
            {"type": "grpo", "group_size": 2},
            rows=4,
            reward=reward | {"environment_weight": weight},
        )
        played.source._questions = Questions(Silent(), LettersConfig(), seed=1)
        samples, _ = played.draw(1)
        assert samples.rollout is not None
        assert int(samples.rollout.scored.sum()) == trained
        assert int((samples.batch.loss_mask.sum(dim=1) > 0).sum()) == trained
        assert samples.metrics["episodes_unscored"] == 4


def test_too_many_failures_end_the_draw_at_once(chatml: PreTrainedTokenizerFast) -> None:
    class Broken(Letters):
        def items(self, config: Any, *, seed: int, count: int) -> Any:
            items = super().items(config, seed=seed, count=count)
            return [{**item, "fault": "step"} for item in items]

    played = Played(chatml, _WITH_SPREAD, rows=4)
    played.source._questions = Questions(Broken(), LettersConfig(), seed=1)
    with pytest.raises(JobFailure, match="4 of 4 episodes failed") as caught:
        played.draw(1)
    assert caught.value.reason is Reason.ENVIRONMENT_ERRORS
    assert len(played.policy.calls) == 1
