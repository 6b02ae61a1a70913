"""math/gsm8k: real gold answers, the order of questions, and files that cannot be used."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

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


def verl_row(prompt: Any, gold: Any) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": gold},
        "extra_info": {"index": 0},
    }


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.asyncio
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
async def test_verls_rows_are_asked_as_they_are(form: str, tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    rows = [
        verl_row([system, *asked("What is 70 + 2?")], "72"),
        verl_row(asked("What is half of 5?"), "2.5"),
    ]
    path = tmp_path / f"train.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    config = Gsm8kConfig(path=str(path), instruction="Think.")
    items = {TYPE.key(item): item for item in TYPE.items(config, seed=1, count=9)}
    assert set(items) == {"What is 70 + 2?", "What is half of 5?"}
    first = items["What is 70 + 2?"]
    messages, _ = await TYPE.make(config).reset(seed=1, item=first)
    assert messages == [system, *asked("What is 70 + 2?\n\nThink.")]
    assert (await play(config, first, "It is 72.")).reward == 1.0
    assert (await play(config, first, "It is 73.")).reward == 0.0
    second = items["What is half of 5?"]
    messages, _ = await TYPE.make(config).reset(seed=1, item=second)
    assert messages == asked("What is half of 5?\n\nThink.")
    assert (await play(config, second, "2.50")).reward == 1.0


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (verl_row(asked("Which?"), "the first"), "row 1: the answer must end in"),
        (verl_row(asked("Which?"), None), "row 1 needs `reward_model.ground_truth`"),
        (verl_row([*asked("Which?"), {"role": "assistant", "content": "1"}], "1"), "must end with"),
        (verl_row([], "1"), "must end with the user's message"),
        (verl_row([{"role": "user", "content": None}], "1"), "must be a list of messages"),
        (verl_row(7, "1"), "must be a list of messages, or a text"),
    ],
)
def test_c01_verls_rows_that_cannot_be_used(
    row: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(InvalidConfig, match=problem):
        TYPE.items(Gsm8kConfig(path=str(path)), seed=1, count=1)


def test_c01_a_torn_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([verl_row(asked("1?"), "1")]), path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InvalidConfig, match="no Parquet file that can be read"):
        TYPE.items(Gsm8kConfig(path=str(path)), seed=1, count=1)
