import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from algorithms.data.chat import ChatFormat
from algorithms.data.collation import collate
from algorithms.data.dataset import load_dataset
from algorithms.data.tokenized import Rules
from service.spec.rows import RowError


def _write(path: Path, *answers: str) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _rules(max_length: int, too_long: Any = "refuse", **others: Any) -> Rules:
    return Rules(kind="conversation", max_length=max_length, too_long=too_long, **others)


@pytest.fixture
def chat(chatml: PreTrainedTokenizerFast) -> ChatFormat:
    return ChatFormat(chatml)


def test_rows_come_in_file_order_with_their_masks(tmp_path: Path, chat: ChatFormat) -> None:
    path = _write(tmp_path / "rows.jsonl", "x", "y")
    dataset = load_dataset(path, chat, _rules(64, "refuse"))
    texts = [
        chat.text(example.tokens[example.trained > 0].tolist()) for example in dataset.examples
    ]
    assert texts == ["x<|im_end|>", "y<|im_end|>"]
    assert (dataset.dropped, dataset.truncated) == (0, 0)


def test_a_row_that_is_too_long_is_refused_with_its_line(tmp_path: Path, chat: ChatFormat) -> None:
    path = _write(tmp_path / "rows.jsonl", "x", "digits 0123456789 0123456789")
    with pytest.raises(RowError, match=r"line 2: \d+ tokens, but `training.max_length` is 30"):
        load_dataset(path, chat, _rules(30, "refuse"))


@pytest.mark.parametrize("rule", ["drop", "truncate-left", "truncate-right"])
def test_the_length_rule_is_applied_and_counted(
    tmp_path: Path, chat: ChatFormat, rule: str
) -> None:
    long = "digits 0123456789 0123456789"
    path = _write(tmp_path / "rows.jsonl", "x", long)
    whole = load_dataset(path, chat, _rules(100, "refuse")).examples[1].tokens
    dataset = load_dataset(path, chat, _rules(30, rule))
    if rule == "drop":
        assert (len(dataset.examples), dataset.dropped, dataset.truncated) == (1, 1, 0)
    else:
        assert (len(dataset.examples), dataset.dropped, dataset.truncated) == (2, 0, 1)
        kept = whole[-30:] if rule == "truncate-left" else whole[:30]
        assert dataset.examples[1].tokens.tolist() == kept.tolist()


def test_a_truncated_row_without_an_answer_left_is_dropped(
    tmp_path: Path, chat: ChatFormat
) -> None:
    path = _write(tmp_path / "rows.jsonl", "x")
    with pytest.raises(ValueError, match="no row to train on: all 1 are too long"):
        load_dataset(path, chat, _rules(4, "truncate-right"))


def test_b01_a_row_whose_mask_cannot_be_made_is_named(tmp_path: Path, chat: ChatFormat) -> None:
    path = _write(tmp_path / "rows.jsonl", "x", "a<|im_end|>b")
    with pytest.raises(RowError, match=r"line 2: messages\[1\] contains"):
        load_dataset(path, chat, _rules(64, "refuse"))


def test_an_empty_file_is_refused(tmp_path: Path, chat: ChatFormat) -> None:
    with pytest.raises(ValueError, match="the file is empty"):
        load_dataset(_write(tmp_path / "rows.jsonl"), chat, _rules(64, "refuse"))


def test_a_batch_is_padded_to_a_multiple_but_not_beyond_the_bound(
    tmp_path: Path, chat: ChatFormat
) -> None:
    path = _write(tmp_path / "rows.jsonl", "x", "a longer answer")
    examples = load_dataset(path, chat, _rules(64, "refuse")).examples
    longest = max(len(example.tokens) for example in examples)
    batch = collate(examples, padding_id=0, max_length=64)
    assert batch.tokens.shape[1] == -(-longest // 8) * 8
    assert batch.lengths.tolist() == [len(example.tokens) for example in examples]
    assert collate(examples, padding_id=0, max_length=longest).tokens.shape[1] == longest
    for row, example in enumerate(examples):
        assert batch.tokens[row, : len(example.tokens)].tolist() == example.tokens.tolist()
        assert not batch.loss_mask[row, len(example.tokens) :].any()
