"""Every row of the public sample files: what is trained, decoded, is the answer and no more."""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from algorithms.data.chat import ChatFormat
from algorithms.data.examples import Example, LabelledExample, Pair
from algorithms.data.tokenized import Rules, tokenized_rows
from service.spec.algorithm import RowKind
from service.spec.rows import RowFile

STYLES = ["chatml", "headers"]
NO_BOUND = 10**9


@pytest.fixture
def chat(request: pytest.FixtureRequest) -> ChatFormat:
    return ChatFormat(request.getfixturevalue(request.param))


@pytest.fixture(scope="session")
def gsm8k(llamafactory: Path) -> Path:
    return llamafactory.parent / "gsm8k"


def _rows(path: Path, chat: ChatFormat, kind: RowKind) -> Iterator[tuple[Any, Any]]:
    """Each row as this test reads it, and as the code under test does."""
    text = path.read_text(encoding="utf-8")
    raw = json.loads(text) if path.suffix == ".json" else map(json.loads, text.splitlines())
    found = tokenized_rows(RowFile(path), chat, Rules(kind=kind, max_length=NO_BOUND))
    for source, row in zip(raw, found, strict=True):
        yield source, row.result


def _trained(chat: ChatFormat, example: Example) -> list[str]:
    """Text of each run of trained tokens; the sequence ends with the last of them."""
    assert example.trained[0] == 0
    assert example.trained[-1] == 1
    pairs = zip(example.tokens.tolist(), example.trained.tolist(), strict=True)
    runs = [(on, [t for t, _ in run]) for on, run in groupby(pairs, key=lambda pair: pair[1])]
    return [chat.text(ids) for on, ids in runs if on]


def _written(chat: ChatFormat, answer: str) -> str:
    """An answer as the template writes it: Llama 3's trims it."""
    return (answer.strip() if chat.end_of_turn == "<|eot|>" else answer) + chat.end_of_turn


@pytest.mark.parametrize("chat", STYLES, indirect=True)
@pytest.mark.parametrize(
    ("name", "count"),
    [("alpaca_en_demo.json", 999), ("alpaca_zh_demo.json", 1000), ("identity.json", 91)],
)
def test_alpaca(llamafactory: Path, name: str, count: int, chat: ChatFormat) -> None:
    rows = list(_rows(llamafactory / name, chat, "conversation"))
    assert len(rows) == count
    for source, example in rows:
        assert _trained(chat, example) == [_written(chat, source["output"])]
        question = "\n".join(part for part in (source["instruction"], source["input"]) if part)
        prompt = chat.text(example.tokens[example.trained == 0].tolist())
        assert question.strip() in prompt


@pytest.mark.parametrize("chat", STYLES, indirect=True)
def test_pairs(llamafactory: Path, chat: ChatFormat) -> None:
    rows = list(_rows(llamafactory / "dpo_en_demo.json", chat, "preference"))
    assert len(rows) == 300
    for source, pair in rows:
        assert isinstance(pair, Pair)
        for name, example in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            assert _trained(chat, example) == [_written(chat, source[name]["value"])]
        prompts = [e.tokens[e.trained == 0].tolist() for e in (pair.chosen, pair.rejected)]
        assert prompts[0] == prompts[1]
        said = chat.text(prompts[0])
        assert all(turn["value"].strip() in said for turn in source["conversations"])


@pytest.mark.parametrize("chat", STYLES, indirect=True)
def test_labels(llamafactory: Path, chat: ChatFormat) -> None:
    rows = list(_rows(llamafactory / "kto_en_demo.json", chat, "label"))
    assert len(rows) == 300
    for source, labelled in rows:
        assert isinstance(labelled, LabelledExample)
        answer = source["messages"][-1]["content"]
        assert _trained(chat, labelled.answer) == [_written(chat, answer)]
    assert sum(labelled.desirable for _, labelled in rows) == 150


@pytest.mark.parametrize("chat", ["chatml"], indirect=True)
def test_tool_calls(llamafactory: Path, chat: ChatFormat) -> None:
    rows = list(_rows(llamafactory / "glaive_toolcall_en_demo.json", chat, "conversation"))
    assert len(rows) == 300
    called = 0
    for source, example in rows:
        wanted = []
        for turn in source["conversations"]:
            if turn["from"] == "gpt":
                wanted.append(turn["value"])
            elif turn["from"] == "function_call":
                call = json.loads(turn["value"])
                arguments = json.dumps(call["arguments"], ensure_ascii=False)
                wanted.append(
                    f'<tool_call>{{"name": "{call["name"]}", "arguments": {arguments}}}</tool_call>'
                )
                called += 1
        assert _trained(chat, example) == [_written(chat, text) for text in wanted]
        rest = chat.text(example.tokens[example.trained == 0].tolist())
        results = [t["value"] for t in source["conversations"] if t["from"] == "observation"]
        assert all(result in rest for result in results)
        tools = json.loads(source["tools"] or "[]")
        assert all(f'"name": "{tool["name"]}"' in rest for tool in tools)
    assert called > 200


@pytest.mark.parametrize("chat", ["chatml"], indirect=True)
@pytest.mark.parametrize(
    ("name", "count"),
    [pytest.param("train.jsonl", 7473, marks=pytest.mark.slow), ("test.jsonl", 1319)],
)
def test_gsm8k(gsm8k: Path, name: str, count: int, chat: ChatFormat) -> None:
    rows = list(_rows(gsm8k / name, chat, "conversation"))
    assert len(rows) == count
    for source, example in rows:
        assert _trained(chat, example) == [_written(chat, source["answer"])]


def test_a_sequence_of_real_rows_is_what_the_template_renders(
    llamafactory: Path, chatml: PreTrainedTokenizerFast
) -> None:
    """Decoded, a row is the whole rendering up to the end of its last answer."""
    chat = ChatFormat(chatml)
    for source, example in _rows(llamafactory / "identity.json", chat, "conversation"):
        rendered = chatml.apply_chat_template(
            [
                {"role": "user", "content": source["instruction"]},
                {"role": "assistant", "content": source["output"]},
            ],
            tokenize=False,
        )
        assert chat.text(example.tokens.tolist()) == rendered.removesuffix("\n")
