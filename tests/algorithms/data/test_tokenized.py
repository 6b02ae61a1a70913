"""Rows of each kind as tokens: what is trained, what answers share, what the length rule does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from algorithms.batch import Normalizer
from algorithms.data.chat import ChatFormat
from algorithms.data.collation import collate
from algorithms.data.dataset import load_dataset
from algorithms.data.examples import Example, LabelledExample, Pair
from algorithms.data.tokenized import Rules, TokenizedRow, tokenized_rows
from service.spec.rows import RowError, RowFault, RowFile

USER = {"role": "user", "content": "What is 58 + 26?"}
GOOD = {"role": "assistant", "content": "It is 84."}
BAD = {"role": "assistant", "content": "No."}
PAIR = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "margin": 0.5}
END = "<|im_end|>"


@pytest.fixture
def chat(chatml: PreTrainedTokenizerFast) -> ChatFormat:
    return ChatFormat(chatml)


def _rules(kind: Any, **others: Any) -> Rules:
    return Rules(**{"kind": kind, "max_length": 1000, **others})


def _tokenize(folder: Path, chat: ChatFormat, rules: Rules, *rows: Any) -> list[TokenizedRow]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(tokenized_rows(RowFile(path), chat, rules))


def _texts(chat: ChatFormat, example: Example) -> tuple[str, str]:
    """What is not trained, and what is."""
    context, answer = (example.tokens[example.trained == on].tolist() for on in (0, 1))
    return chat.text(context), chat.text(answer)


def test_both_answers_of_a_pair_have_one_prompt(tmp_path: Path, chat: ChatFormat) -> None:
    (row,) = _tokenize(tmp_path, chat, _rules("preference"), PAIR)
    assert isinstance(row.result, Pair)
    prompt = chat.text(chat.prompt([USER]))
    assert _texts(chat, row.result.chosen) == (prompt, "It is 84." + END)
    assert _texts(chat, row.result.rejected) == (prompt, "No." + END)
    assert row.result.margin == 0.5
    assert row.length == len(row.result.chosen.tokens)


def test_earlier_answers_of_a_pair_are_its_prompt(tmp_path: Path, chat: ChatFormat) -> None:
    (row,) = _tokenize(tmp_path, chat, _rules("preference"), PAIR | {"prompt": [USER, GOOD, USER]})
    assert isinstance(row.result, Pair)
    assert _texts(chat, row.result.chosen)[1] == "It is 84." + END


def test_an_answer_s_reward_is_read_at_its_end_of_turn(tmp_path: Path, chat: ChatFormat) -> None:
    """Where a rollout ends, too; ChatML's newline behind it is left out."""
    for kind, fields in (
        ("preference", PAIR),
        ("label", {"messages": [USER, GOOD], "label": True}),
        ("conversation", {"messages": [USER, GOOD, USER]}),
    ):
        (row,) = _tokenize(tmp_path, chat, _rules(kind), fields)
        result: Any = row.result
        last = getattr(result, "chosen", getattr(result, "answer", result))
        assert int(last.tokens[-1]) == chat.end_of_turn_id


def test_a_label_comes_with_its_answer(tmp_path: Path, chat: ChatFormat) -> None:
    rows = [{"prompt": [USER], "completion": [GOOD], "label": good} for good in (True, False)]
    found = [row.result for row in _tokenize(tmp_path, chat, _rules("label"), *rows)]
    assert all(isinstance(one, LabelledExample) for one in found)
    batch = collate(found, padding_id=0, max_length=1000)  # type: ignore[arg-type]
    assert (batch.unit, batch.per_sequence["desirable"].tolist()) == (1, [True, False])
    assert batch.per_sequence["desirable"].dtype == torch.bool


def test_a_batch_of_pairs_has_the_chosen_answer_first(tmp_path: Path, chat: ChatFormat) -> None:
    rows = [PAIR, PAIR | {"chosen": [BAD], "rejected": [GOOD], "margin": None}]
    items = [row.result for row in _tokenize(tmp_path, chat, _rules("preference"), *rows)]
    batch = collate(items, padding_id=0, max_length=1000)  # type: ignore[arg-type]
    assert batch.unit == 2
    assert batch.per_sequence["margin"].tolist() == [0.5, 0.5, 0.0, 0.0]
    sequences = zip(batch.tokens, batch.loss_mask, strict=True)
    trained = [chat.text(tokens[mask > 0].tolist()) for tokens, mask in sequences]
    assert trained == [text + END for text in ("It is 84.", "No.", "No.", "It is 84.")]
    assert Normalizer.of(batch).units == 2


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("conversation", PAIR),
        ("conversation", {"messages": [USER, GOOD], "label": True}),
        ("preference", {"messages": [USER, GOOD]}),
        ("label", {"messages": [USER, GOOD]}),
        (
            "conversation",
            {"data_source": "x", "prompt": [USER], "reward_model": {"ground_truth": "84"}},
        ),
    ],
)
def test_rows_of_another_kind_are_refused(
    tmp_path: Path, chat: ChatFormat, kind: str, row: Any
) -> None:
    (found,) = _tokenize(tmp_path, chat, _rules(kind), row)
    assert isinstance(found.result, RowFault)
    assert "but the algorithm trains on rows" in found.result.message
    with pytest.raises(RowError, match=r"^line 1: "):
        load_dataset(tmp_path / "rows.jsonl", chat, _rules(kind))


STRINGS = {"prompt": "What is 58 + 26?", "completion": "It is 84."}


def test_strings_are_a_user_s_and_an_assistant_s_message(tmp_path: Path, chat: ChatFormat) -> None:
    asked = {"messages": [USER, GOOD]}
    strings, messages = _tokenize(tmp_path, chat, _rules("conversation"), STRINGS, asked)
    assert isinstance(strings.result, Example)
    assert isinstance(messages.result, Example)
    assert strings.result.tokens.tolist() == messages.result.tokens.tolist()
    assert strings.result.trained.tolist() == messages.result.trained.tolist()


@pytest.mark.parametrize("style", ["chatml", "words", "headers"])
def test_plain_strings_see_no_template(
    tmp_path: Path, style: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(style)
    chat, rules = ChatFormat(tokenizer), _rules("conversation", strings="plain")
    (row,) = _tokenize(tmp_path, chat, rules, STRINGS)
    assert isinstance(row.result, Example)
    bos = tokenizer.bos_token if style == "headers" else ""
    context, answer = _texts(chat, row.result)
    # SentencePiece's kind begins every text with a space, and decodes it.
    assert context == (" " if style == "words" else bos) + "What is 58 + 26?"
    assert answer == "It is 84." + tokenizer.eos_token
    prompt = tokenizer("What is 58 + 26?")["input_ids"]  # with whatever it adds by itself
    assert row.result.tokens[: len(prompt)].tolist() == prompt


def test_b03_plain_strings_that_have_their_ends_get_no_second_ones(
    tmp_path: Path, headers: PreTrainedTokenizerFast
) -> None:
    chat, rules = ChatFormat(headers), _rules("preference", strings="plain")
    row = {"prompt": "<|begin|>What", "chosen": "It<|eot|>", "rejected": "No"}
    (found,) = _tokenize(tmp_path, chat, rules, row)
    assert isinstance(found.result, Pair)
    assert _texts(chat, found.result.chosen) == ("<|begin|>What", "It<|eot|>")
    for example in (found.result.chosen, found.result.rejected):
        ids = example.tokens.tolist()
        assert ids.count(headers.bos_token_id) == ids.count(headers.eos_token_id) == 1


def test_strings_that_went_through_a_template_are_not_put_through_another(
    tmp_path: Path, chat: ChatFormat
) -> None:
    row = {"prompt": "<|im_start|>user\nhi<|im_end|>\n", "completion": "ho"}
    (found,) = _tokenize(tmp_path, chat, _rules("conversation"), row)
    assert isinstance(found.result, RowFault)
    assert "`data.strings` to plain" in str(found.result)


def _lengths(chat: ChatFormat) -> tuple[int, int, int]:
    """Tokens of the prompt, the good and the bad answer."""
    answers = [len(chat._encode(one["content"])) + 1 for one in (GOOD, BAD)]
    return len(chat.prompt([USER])), answers[0], answers[1]


def test_truncation_on_the_left_keeps_one_prompt_for_both(tmp_path: Path, chat: ChatFormat) -> None:
    """Each cut by itself, the shorter answer would keep more of the prompt than the longer."""
    prompt, good, bad = _lengths(chat)
    rules = _rules("preference", max_length=good + 5, too_long="truncate-left")
    (row,) = _tokenize(tmp_path, chat, rules, PAIR)
    assert row.truncated
    assert isinstance(row.result, Pair)
    chosen, rejected = row.result.chosen, row.result.rejected
    assert (len(chosen.tokens), len(rejected.tokens)) == (5 + good, 5 + bad)
    assert chosen.tokens[:5].tolist() == rejected.tokens[:5].tolist()
    assert chosen.tokens[:5].tolist() == chat.prompt([USER])[prompt - 5 :]


def test_truncation_on_the_right_cuts_each_answer(tmp_path: Path, chat: ChatFormat) -> None:
    prompt, _, bad = _lengths(chat)
    rules = _rules("preference", max_length=prompt + 2, too_long="truncate-right")
    (row,) = _tokenize(tmp_path, chat, rules, PAIR)
    assert isinstance(row.result, Pair)
    assert [int(e.trained.sum()) for e in (row.result.chosen, row.result.rejected)] == [
        2,
        min(bad, 2),
    ]


@pytest.mark.parametrize("too_long", ["drop", "truncate-left", "truncate-right"])
def test_a_pair_is_dropped_as_a_whole(tmp_path: Path, chat: ChatFormat, too_long: str) -> None:
    prompt, good, _ = _lengths(chat)
    bound = {"drop": prompt + good - 1, "truncate-left": good, "truncate-right": prompt}[too_long]
    rules = _rules("preference", max_length=bound, too_long=too_long)
    short = PAIR | {"prompt": [{"role": "user", "content": "?"}], "chosen": [BAD]}
    rows = _tokenize(tmp_path, chat, rules, PAIR, short)
    assert rows[0].result is None
    assert rows[0].length == prompt + good
    if too_long == "drop":
        dataset = load_dataset(tmp_path / "rows.jsonl", chat, rules)
        assert (len(dataset.examples), dataset.dropped) == (1, 1)


def test_a_pair_that_is_too_long_is_refused_by_its_longer_answer(
    tmp_path: Path, chat: ChatFormat
) -> None:
    prompt, good, _ = _lengths(chat)
    (row,) = _tokenize(tmp_path, chat, _rules("preference", max_length=prompt + good - 1), PAIR)
    assert isinstance(row.result, RowFault)
    assert f"{prompt + good} tokens" in row.result.message


def test_a_template_that_renders_the_prompt_by_its_answer_is_refused(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    copy = PreTrainedTokenizerFast(
        tokenizer_object=chatml.backend_tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    copy.chat_template = chatml.chat_template.replace(
        "'<|im_start|>user\\n' + message.content",
        "'<|im_start|>user\\n' + message.content + ('?' if messages[-1].content == 'No.' else '')",
    )
    (row,) = _tokenize(tmp_path, ChatFormat(copy), _rules("preference"), PAIR)
    assert isinstance(row.result, RowFault)
    assert "renders what precedes" in row.result.message


def test_a_bad_row_does_not_move_the_others(tmp_path: Path, chat: ChatFormat) -> None:
    rows = [{"messages": [USER, GOOD]}, {"messages": "text"}, {"messages": [USER, BAD]}]
    found = _tokenize(tmp_path, chat, _rules("conversation"), *rows)
    assert [row.place for row in found] == ["line 1", "line 2", "line 3"]
    assert isinstance(found[1].result, RowFault)
    assert isinstance(found[2].result, Example)
    assert _texts(chat, found[2].result)[1] == "No." + END
