"""Rewards stand at the last token of the turn that earned them, and nowhere else."""

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from algorithms.batch import Batch
from algorithms.data.chat import ChatFormat
from algorithms.phases import PhaseClock
from algorithms.rollout.collector import Collector
from algorithms.rollout.episode import Episode, Segment
from algorithms.rollout.tensors import episode_batch, episode_rollout
from algorithms.samples import Rollout
from service.spec import RewardSpec
from tests.algorithms.letters import Letters, LettersConfig
from tests.algorithms.rollout.episodes import episode, turn
from tests.algorithms.scripted import ScriptedPolicy

EOS, CUSTOM_STOP, PAD = 2, 9, 0
BY_MODEL = RewardSpec.model_validate(
    {"environment_weight": 0.0, "model": {"source": {"path": "reward"}}}
)


def _rollout(episodes: list[Episode], reward: RewardSpec = RewardSpec()) -> Rollout:  # noqa: B008
    batch: Batch = episode_batch(episodes, reward=reward, padding_id=PAD, max_length=64)
    return episode_rollout(episodes, batch, reward=reward)


def test_a30_the_reward_is_at_the_end_of_turn_token_and_never_at_padding() -> None:
    short, long = episode([turn([5, 6, EOS])], 1.0), episode([turn([5, 6, 7, 8, EOS])], 0.25)
    rollout = _rollout([short, long])
    assert rollout.batch.tokens[0].tolist() == [1, 2, 5, 6, EOS, PAD, PAD, PAD]
    # Index 2 of the answer, behind the prompt's two tokens.
    assert rollout.rewards[0].tolist() == [0, 0, 0, 0, 1.0, 0, 0, 0]
    assert rollout.rewards[1].tolist() == [0, 0, 0, 0, 0, 0, 0.25, 0]
    assert rollout.last.tolist() == [4, 6]
    assert bool((rollout.rewards[rollout.batch.loss_mask == 0] == 0).all())


def test_where_nothing_is_learned_from_rewards_all_that_was_played_is_trained() -> None:
    unscored, failed = episode([turn([5, EOS])], None), episode([turn([6, EOS])], 1.0)
    failed.fail(RuntimeError("broken"))
    batch = episode_batch([unscored, failed], reward=None, padding_id=PAD, max_length=64)
    rollout = episode_rollout([unscored, failed], batch, reward=None)
    assert batch.loss_mask.sum(dim=1).tolist() == [2, 0]
    assert rollout.scored.tolist() == [True, False]
    assert not rollout.rewards.any()


def test_a30_i05_each_turn_s_reward_is_at_that_turn_s_last_token() -> None:
    said = Segment(origin="observation", token_ids=[3, 3])
    turns = [turn([5, EOS]), said, turn([6], "length"), said, turn([7, 8, EOS])]
    rollout = _rollout([episode(turns, 0.2, 0.0, 1.0), episode([turn([5, EOS])], -1.0)])
    assert rollout.rewards[0, :12].tolist() == [0, 0, 0, 0.2, 0, 0, 0, 0, 0, 0, 0, 1.0]
    assert rollout.returns.tolist() == [pytest.approx(1.2), -1.0]
    assert rollout.scored.tolist() == [True, True]


def test_a30_the_penalty_goes_by_the_stop_reason_and_not_by_one_token() -> None:
    reward = RewardSpec(unfinished_penalty=0.5)
    episodes = [
        episode([turn([5, 6, EOS])], 1.0),
        episode([turn([5, 6, CUSTOM_STOP])], 1.0),
        episode([turn([5, 6, 7], "length")], 1.0),
        # An eos id that the model does not stop at, and the bound right behind it.
        episode([turn([5, 6, EOS], "length")], 1.0),
        # Only the last turn counts: an earlier one that was cut was answered all the same.
        episode([turn([5], "length"), turn([CUSTOM_STOP])], 0.25, 0.25),
        # Cut by the number of turns, and finished.
        episode([turn([5, CUSTOM_STOP])], 1.0, truncated=True),
    ]
    rollout = _rollout(episodes, reward)
    assert rollout.returns.tolist() == [1.0, 1.0, 0.5, 0.5, 0.5, 1.0]
    assert rollout.rewards[2, :5].tolist() == [0, 0, 0, 0, 0.5]


def test_a30_a_model_s_own_stop_token_is_no_cut(chatml: PreTrainedTokenizerFast) -> None:
    """From the generator's word on: `...` stands for a turn that a bound cut."""
    chat = ChatFormat(chatml)
    policy = ScriptedPolicy(chat, [["aa"], ["aa..."]], 100)
    collector = Collector(
        environment=Letters(),
        config=LettersConfig(),
        max_turns=1,
        generator=policy,
        chat=chat,
        max_new_tokens=16,
        timeout_seconds=5.0,
    )
    episodes = collector.collect([{"letter": "a"}] * 2, temperature=1.0, seed=1, clock=PhaseClock())
    assert [e.unfinished for e in episodes] == [False, True]
    returns = _rollout(episodes, RewardSpec(unfinished_penalty=0.25)).returns
    assert returns.tolist() == [1.0, 0.75]


def test_the_environment_s_weight_counts_without_a_reward_model_too() -> None:
    reward = RewardSpec(environment_weight=0.5, unfinished_penalty=0.25)
    rollout = _rollout([episode([turn([5, 6], "length")], 1.0)], reward)
    assert rollout.returns.tolist() == [0.25]  # the penalty has no weight but its own


def test_a06_what_was_not_scored_is_not_trained() -> None:
    failed = episode([turn([5, EOS])], 1.0)
    failed.fail(ValueError("x"))
    nothing = Episode(item={})
    nothing.fail(ValueError("at reset"))
    episodes = [episode([turn([5, EOS])], 1.0), episode([turn([5, EOS])], None), failed, nothing]
    rollout = _rollout(episodes)
    assert rollout.scored.tolist() == [True, False, False, False]
    assert rollout.batch.loss_mask.sum(dim=1).tolist() == [2, 0, 0, 0]
    assert rollout.returns.tolist() == [1, 0, 0, 0]
    assert rollout.batch.lengths.tolist() == [4, 4, 4, 1]


def test_a_reward_model_scores_what_the_environment_could_not() -> None:
    failed = episode([turn([5, EOS])])
    failed.fail(ValueError("x"))
    said = Segment(origin="observation", token_ids=[3])
    half = episode([turn([5, EOS]), said, turn([6, EOS])], 1.0, None)
    episodes = [episode([turn([5, EOS])], None), failed, half]
    rollout = _rollout(episodes, BY_MODEL)
    assert rollout.scored.tolist() == [True, False, True]
    assert rollout.batch.loss_mask.sum(dim=1).tolist() == [2, 0, 4]
    assert rollout.returns.tolist() == [0, 0, 0]  # the environment's 1.0 has no weight
    mixed = BY_MODEL.model_copy(update={"environment_weight": 1.0})
    assert _rollout(episodes, mixed).scored.tolist() == [False, False, False]


def test_a03_rewards_of_turns_add_up_as_exactly_as_in_one() -> None:
    """In float32 these two differ by 7e-9, and a group's statistics would make that +-0.87."""
    rollout = _rollout(
        [episode([turn([5, EOS]), turn([6, EOS])], 0.1, 0.2), episode([turn([5, EOS])], 0.3)]
    )
    first, second = rollout.returns.tolist()
    assert abs(first - second) < 1e-15


def test_baselines_are_each_question_s_greedy_answer() -> None:
    sampled = _rollout([episode([turn([5, EOS])], 1.0) for _ in range(4)])
    greedy = _rollout([episode([turn([5, EOS])], 0.5), episode([turn([5, EOS])], None)])
    grouped = Rollout(
        batch=sampled.batch, rewards=sampled.rewards, scored=sampled.scored, group_size=2
    )
    baselines = grouped.with_baselines(greedy).baselines
    assert baselines is not None
    assert torch.equal(baselines[:2], torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert bool(baselines[2:].isnan().all())
