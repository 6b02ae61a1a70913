"""math/gsm8k: real gold answers, the order of questions, and files that cannot be used."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from environments.config import InvalidConfig, parse_config
from environments.gsm8k import Gsm8kConfig, Gsm8kType
from environments.numeric_answers import parse_gold, verify
from environments.protocol import AssistantTurn, StepResult

TYPE = Gsm8kType()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


async def play(config: Gsm8kConfig, item: Mapping[str, Any], text: str) -> StepResult:
    env = TYPE.make(config)
    await env.reset(seed=1, item=item)
    result = await env.step(AssistantTurn(text=text))
    await env.close()
    return result


def test_every_real_gold_answer_scores_itself_and_nothing_else(gsm8k: Path) -> None:
    lines = [
        line
        for name in ("train.jsonl", "test.jsonl")
        for line in (gsm8k / name).read_bytes().splitlines()
    ]
    assert len(lines) == 8792
    for line in lines:
        answer = json.loads(line)["answer"]
        gold = parse_gold(answer)
        assert gold is not None, answer
        assert verify(answer, answer).reward == 1.0, answer
        assert verify(answer, answer, extraction="strict").reward == 1.0, answer
        steps = answer.rpartition("####")[0]
        assert verify(f"{steps}#### {gold + 1}", answer).reward == 0.0, answer


@pytest.mark.asyncio
async def test_real_rows_become_episodes(gsm8k: Path) -> None:
    config = Gsm8kConfig(path=str(gsm8k / "test.jsonl"))
    items = TYPE.items(config, seed=1, count=2000)
    assert len({TYPE.key(item) for item in items}) == 1319
    for item in items[:50]:
        gold = str(parse_gold(item["answer"]))
        assert (await play(config, item, f"So it is ${gold}.")).reward == 1.0
        assert (await play(config, item, f"So it is {gold}1.")).reward == 0.0


def test_the_seed_decides_the_order(file: Path) -> None:
    config = Gsm8kConfig(path=str(file))
    ten = TYPE.items(config, seed=1, count=10)
    assert TYPE.items(config, seed=1, count=20)[:10] == ten
    assert TYPE.items(config, seed=2, count=10) != ten
    assert len(TYPE.items(config, seed=1, count=100)) == 20


@pytest.mark.asyncio
async def test_an_episode_has_one_turn(file: Path) -> None:
    config = Gsm8kConfig(path=str(file), instruction="Answer in one word.")
    item = TYPE.items(config, seed=1, count=1)[0]
    env = TYPE.make(config)
    messages, _ = await env.reset(seed=1, item=item)
    assert messages == [{"role": "user", "content": f"{item['question']}\n\nAnswer in one word."}]
    result = await env.step(AssistantTurn(text=item["answer"]))
    assert (result.reward, result.terminated, result.truncated) == (1.0, True, False)
    assert result.info["reward_components"] == {"answer": 1.0}
    assert result.info["metrics"] == {"answer_found": 1.0}
    await env.close()


@pytest.mark.asyncio
async def test_strict_extraction_is_an_option(file: Path) -> None:
    config = Gsm8kConfig(path=str(file), extraction="strict")
    item = {"question": "What is 1 + 1?", "answer": "#### 2"}
    assert (await play(config, item, "2")).reward == 0.0
    assert (await play(config, item, "#### 2")).reward == 1.0


@pytest.mark.asyncio
async def test_c01_a_gold_answer_in_words_is_unscorable(file: Path) -> None:
    item = {"question": "How long?", "answer": "It takes 180 days"}
    result = await play(Gsm8kConfig(path=str(file)), item, r"\boxed{7}")
    assert result.reward is None
    assert result.info["reason"].startswith("unparseable_gold")
    assert result.info["reward_components"] == {}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "How long?", "answer": "It takes 180 days"}, "row 21.*#### NUMBER"),
        ({"question": "How long?", "answer": 5}, "row 21 needs texts"),
        ({"question": " ", "answer": "#### 5"}, "row 21 needs texts"),
        ({"answer": "#### 5"}, "row 21 needs texts"),
    ],
)
def test_c01_bad_rows_are_refused_when_the_file_is_read(
    file: Path, row: dict[str, object], message: str
) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    with pytest.raises(InvalidConfig, match=message) as raised:
        TYPE.items(Gsm8kConfig(path=str(file)), seed=1, count=1)
    assert raised.value.problems[0].loc == ("path",)


@pytest.mark.parametrize(
    ("config", "loc"),
    [
        ({}, ("path",)),
        ({"path": ""}, ("path",)),
        ({"path": 3}, ("path",)),
        ({"path": "/x", "extraction": "loose"}, ("extraction",)),
        ({"path": "/x", "shuffle": True}, ("shuffle",)),
    ],
)
def test_config_errors_name_the_field(config: dict[str, object], loc: tuple[str, ...]) -> None:
    with pytest.raises(InvalidConfig) as raised:
        parse_config(Gsm8kConfig, config)
    assert [problem.loc for problem in raised.value.problems] == [loc]
