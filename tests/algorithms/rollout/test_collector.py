import math
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from algorithms.data.chat import ChatFormat
from algorithms.errors import JobFailure
from algorithms.phases import PhaseClock
from algorithms.rollout.collector import Collector
from algorithms.rollout.episode import Episode
from algorithms.rollout.statistics import episode_metrics, episode_warnings, refuse_many_errors
from algorithms.rollout.tensors import episode_batch
from environments import registry
from environments.protocol import EnvironmentType
from service.spec import Reason, RewardSpec
from tests.algorithms.letters import Letters, LettersConfig
from tests.algorithms.scripted import ScriptedPolicy


@pytest.fixture
def chat(chatml: PreTrainedTokenizerFast) -> ChatFormat:
    return ChatFormat(chatml)


def _collect(
    chat: ChatFormat,
    items: list[dict[str, Any]],
    turns: list[list[str]],
    *,
    environment: EnvironmentType | None = None,
    config: Any = None,
    max_turns: int = 4,
    max_length: int = 200,
    timeout: float = 5.0,
    repeats: int = 1,
) -> tuple[list[Episode], ScriptedPolicy]:
    policy = ScriptedPolicy(chat, turns, max_length)
    collector = Collector(
        environment=environment or Letters(),
        config=config or LettersConfig(),
        max_turns=max_turns,
        generator=policy,
        chat=chat,
        max_new_tokens=16,
        timeout_seconds=timeout,
    )
    episodes = collector.collect(
        items, temperature=1.0, seed=7, clock=PhaseClock(), repeats=repeats
    )
    return episodes, policy


def test_i01_one_exception_ends_one_episode(chat: ChatFormat) -> None:
    items = [{"letter": "a"} for _ in range(8)]
    items[3]["fault"] = "step"
    episodes, _ = _collect(chat, items, [["aab"]] * 8)
    assert [episode.reward for episode in episodes] == pytest.approx(
        [2 / 3] * 3 + [None] + [2 / 3] * 4
    )
    assert (episodes[3].error, episodes[3].error_message) == (
        "ZeroDivisionError",
        "bad environment",
    )
    batch = episode_batch(episodes, reward=RewardSpec(), padding_id=0, max_length=200)
    assert len(batch) == 8
    assert (batch.loss_mask.sum(dim=1) > 0).tolist() == [True] * 3 + [False] + [True] * 4
    metrics = episode_metrics(episodes)
    assert (metrics["episodes"], metrics["episodes_failed"]) == (8, 1)
    assert metrics["reward_mean"] == pytest.approx(2 / 3)
    (warning,) = episode_warnings(episodes)
    assert warning["errors"] == {"ZeroDivisionError": 1}
    refuse_many_errors(episodes, 0.125)
    with pytest.raises(
        JobFailure, match=r"1 of 8 episodes failed \(1 ZeroDivisionError\)"
    ) as caught:
        refuse_many_errors(episodes, 0.12)
    assert caught.value.reason is Reason.ENVIRONMENT_ERRORS


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("reset", "LookupError", "no such question"),
        ("hang", "TimeoutError", "no answer within 0.05 seconds"),
        ("cancel", "CancelledError", ""),
        ("silent", "RuntimeError", "neither ended the episode nor said anything"),
    ],
)
def test_i01_whatever_fails_every_environment_is_closed_once(
    chat: ChatFormat, fault: str, error: str, message: str
) -> None:
    environment = Letters()
    items = [{"letter": "a"}, {"letter": "a", "fault": fault, "rewards": [0.0, 0.0]}]
    turns = [["a"]] if fault == "reset" else [["a"], ["a", "a"]]
    episodes, _ = _collect(chat, items, turns, environment=environment, timeout=0.05)
    assert episodes[0].reward == 1.0
    assert episodes[1].error == error
    assert message in episodes[1].error_message
    assert [env.closed for env in environment.opened] == [1, 1]


def test_an_environment_that_cannot_be_closed_costs_no_reward(chat: ChatFormat) -> None:
    environment = Letters()
    items = [{"letter": "a"}, {"letter": "a", "fault": "close"}]
    episodes, _ = _collect(chat, items, [["a"], ["a"]], environment=environment)
    assert [episode.reward for episode in episodes] == [1.0, 1.0]
    assert [env.closed for env in environment.opened] == [1, 1]
    (warning,) = episode_warnings(episodes)
    assert "OSError: cannot close" in warning["message"]


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a06_a_reward_that_is_no_number_fails_its_episode(chat: ChatFormat, reward: float) -> None:
    items = [{"letter": "a"}, {"letter": "a", "rewards": [reward]}]
    episodes, _ = _collect(chat, items, [["a"], ["a"]])
    assert [episode.reward for episode in episodes] == [1.0, None]
    assert episodes[1].error_message == f"the environment gave the reward {reward}"


def test_i05_the_return_is_the_sum_over_turns(chat: ChatFormat) -> None:
    items = [{"letter": "a", "rewards": [0.2, 0.0, 1.0]}, {"letter": "a", "rewards": [1.0, None]}]
    episodes, _ = _collect(chat, items, [["a", "b", "c"], ["a", "b"]])
    assert episodes[0].reward == pytest.approx(1.2)
    assert episodes[1].reward is None
    assert episode_metrics(episodes)["episodes_unscored"] == 1


def test_b05_b09_every_token_keeps_where_it_came_from(chat: ChatFormat) -> None:
    items = [{"letter": "a", "rewards": [0.0, 0.0, 1.0]}]
    (episode,), policy = _collect(chat, items, [["aa", "bb", "cc"]])
    origins = [segment.origin for segment in episode.segments]
    assert origins == ["prompt", "policy", "observation", "policy", "observation", "policy"]
    written = [chat.text(s.token_ids) for s in episode.segments if s.origin == "policy"]
    assert written == ["aa<|im_end|>", "bb<|im_end|>", "cc<|im_end|>"]
    # The next prompt is what was there, then what was sampled, then what was said.
    assert policy.prompts[1][0][: len(policy.prompts[0][0])] == policy.prompts[0][0]
    assert policy.prompts[2][0] == [t for s in episode.segments[:5] for t in s.token_ids]
    whole = chat.prompt(episode.messages)
    assert whole[: len(episode.token_ids)] == episode.token_ids
    assert sum(episode.policy_mask) == sum(len(s.token_ids) for s in episode.segments[1::2])
    by_token = zip(episode.policy_mask, episode.log_probs, strict=True)
    assert all((log_prob != 0.0) == bool(on) for on, log_prob in by_token)
    batch = episode_batch([episode], reward=RewardSpec(), padding_id=0, max_length=200)
    trained = batch.tokens[0][batch.loss_mask[0] > 0].tolist()
    assert chat.text(trained) == "aa<|im_end|>bb<|im_end|>cc<|im_end|>"
    kept = batch.per_token["rollout_log_probs"][0][batch.loss_mask[0] > 0].tolist()
    assert kept == pytest.approx([x for s in episode.segments for x in s.log_probs])
    assert {s.weight_version for s in episode.segments if s.origin == "policy"} == {0}


def test_a_turn_limit_cuts_an_episode(chat: ChatFormat) -> None:
    items = [{"letter": "a", "rewards": [0.1, 0.2, 0.4]}]
    (episode,), policy = _collect(chat, items, [["a", "b"]], max_turns=2)
    assert (episode.truncated, len(policy.prompts)) == (True, 2)
    assert episode.reward == pytest.approx(0.3)


def test_i03_an_episode_without_room_for_another_turn_is_cut(chat: ChatFormat) -> None:
    items = [{"letter": "a", "rewards": [0.5, 1.0]}]
    (whole,), _ = _collect(chat, items, [["a", "b"]])
    room = len([t for s in whole.segments[:3] for t in s.token_ids])
    (fits,), _ = _collect(chat, items, [["a", "b"]], max_length=room + 1)
    assert (fits.reward, fits.truncated) == (1.5, False)
    (cut,), policy = _collect(chat, items, [["a", "b"]], max_length=room)
    assert (cut.reward, cut.truncated, len(policy.prompts)) == (0.5, True, 1)
    assert cut.segments[-1].origin == "policy"


def test_a_question_that_leaves_no_room_fails_its_own_episode(chat: ChatFormat) -> None:
    items = [{"letter": "a"}, {"letter": "a", "prompt": "a long question " * 20}]
    episodes, policy = _collect(chat, items, [["a"]], max_length=60)
    assert episodes[0].reward == 1.0
    assert episodes[1].error == "ValueError"
    assert "leaves no room" in episodes[1].error_message
    assert len(policy.prompts[0]) == 1


def test_a_cut_turn_is_closed_before_the_environment_speaks(chat: ChatFormat) -> None:
    environment = Letters()
    items = [{"letter": "a", "rewards": [0.0, 1.0]}]
    (episode,), policy = _collect(chat, items, [["aa...", "b"]], environment=environment)
    assert environment.opened[0].turns[0].truncated
    assert chat.text(policy.prompts[1][0]) == chat.text(chat.prompt(episode.messages[:3]))
    trained = [t for t, on in zip(episode.token_ids, episode.policy_mask, strict=True) if on]
    assert chat.text(trained) == "aab<|im_end|>"


def test_a_group_shares_its_question_and_reset_seed_and_every_turn_draws_anew(
    chat: ChatFormat,
) -> None:
    environment = Letters()
    items = [{"letter": "a", "rewards": [0.0, 0.0]}, {"letter": "b", "rewards": [0.0, 0.0]}]
    episodes, policy = _collect(chat, items, [["a", "a"]] * 4, environment=environment, repeats=2)
    assert [episode.item["letter"] for episode in episodes] == ["a", "a", "b", "b"]
    seeds = [env.seed for env in environment.opened]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert policy.samplings[0].seed != policy.samplings[1].seed
    again, _ = _collect(chat, items, [["a", "a"]] * 4, environment=environment, repeats=2)
    assert [env.seed for env in environment.opened[4:]] == seeds
    assert len(again) == 4


def test_the_calculator_s_answer_is_observed_and_not_trained(chat: ChatFormat) -> None:
    environment = registry.get("tools/calculator")
    config = environment.config_model.model_validate(
        {"questions": {"id": "reasoning_gym/chain_sum", "config": {}}}
    )
    (item,) = environment.items(config, seed=1, count=1)
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 * 21"}}</tool_call>'
    episodes, _ = _collect(
        chat,
        [item, item],
        [[call, "42"], ["<tool_call>{oops</tool_call>", "42"]],
        environment=environment,
        config=config,
        max_turns=2,
        max_length=1000,
    )
    called, malformed = episodes
    assert (called.error, malformed.error) == (None, None)
    assert (called.tool_calls, malformed.tool_calls) == (1, 0)
    assert malformed.malformed_tool_calls == 1
    (observation,) = [s for s in called.segments if s.origin == "observation"]
    assert chat.text(observation.token_ids) == (
        "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    )
    trained = [t for t, on in zip(called.token_ids, called.policy_mask, strict=True) if on]
    assert chat.text(trained) == f"{call}<|im_end|>42<|im_end|>"
    assert episode_metrics(episodes)["tool_rate"] == 0.5
    assert called.messages[1]["tool_calls"][0]["function"]["arguments"] == {"expression": "2 * 21"}
    assert "{oops" in malformed.messages[1]["content"]


def test_a_template_that_cannot_take_turns_fails_the_job(chatml: PreTrainedTokenizerFast) -> None:
    rewriting = PreTrainedTokenizerFast(
        tokenizer_object=chatml.backend_tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    rewriting.chat_template = "{{- messages | length // 3 }}" + chatml.chat_template
    items = [{"letter": "a", "rewards": [0.0, 1.0]}]
    with pytest.raises(JobFailure, match="no rollout of several turns") as caught:
        _collect(ChatFormat(rewriting), items, [["a"]])
    assert caught.value.reason is Reason.USER_ERROR
