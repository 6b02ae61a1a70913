"""What `planish data check` finds, by its own process and in this one."""

import io
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from algorithms.data.__main__ import Unusable, check_file, parser
from algorithms.data.chat import ChatFormat
from algorithms.data.check import Report, Wanted, check, describe
from service.spec.rows import FileFault, RowFile

ROOT = Path(__file__).parents[3]
USER = {"role": "user", "content": "What is 58 + 26?"}
GOOD = {"role": "assistant", "content": "It is 84."}
CHAT = {"messages": [USER, GOOD]}
PAIR = {"prompt": [USER], "chosen": [GOOD], "rejected": [{**GOOD, "content": "No."}]}


def _write(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _check(path: Path, **wanted: Any) -> Report:
    return check(RowFile(path), Wanted(**wanted), lambda *_: None)


@pytest.fixture
def chat(chatml: PreTrainedTokenizerFast) -> ChatFormat:
    return ChatFormat(chatml)


@pytest.mark.parametrize("tokens", [True, False])
def test_rows_are_counted_by_what_becomes_of_them(
    tmp_path: Path, chat: ChatFormat, tokens: bool
) -> None:
    alpaca = {"instruction": "Add.", "output": "84"}
    path = _write(tmp_path, {"text": "?"}, CHAT, alpaca, PAIR, CHAT, {"messages": "x"})
    report = _check(path, chat=chat if tokens else None)
    assert (report.rows, report.accepted, report.rejected) == (6, 3, 3)
    assert report.kind == "conversation"  # of the first row that says
    assert report.formats == {
        "conversation: OpenAI chat": 3,
        "conversation: Alpaca": 1,
        "preference: chosen and rejected": 1,
    }
    assert [problem.place for problem in report.problems] == ["line 1", "line 4", "line 6"]
    assert "no known format" in report.problems[0].message
    assert "a pair of answers" in report.problems[1].message
    assert (report.tokens is None, report.lengths is None) == (not tokens, not tokens)


def test_the_algorithm_decides_the_kind(tmp_path: Path, chat: ChatFormat) -> None:
    report = _check(_write(tmp_path, CHAT, PAIR), kind="preference", chat=chat)
    assert (report.accepted, report.rejected) == (1, 1)
    assert report.problems[0].place == "line 1"
    names = [[piece.trained for piece in sequence] for sequence in report.sample]
    assert names == [[False, True]] * 2
    assert report.sample_place == "line 2"


def test_the_first_20_rejected_rows_are_listed(tmp_path: Path) -> None:
    report = _check(_write(tmp_path, CHAT, *[{"messages": []}] * 30))
    assert [problem.place for problem in report.problems] == [f"line {n}" for n in range(2, 22)]
    assert report.rejected == 30


def test_the_sample_is_the_sequence_with_its_trained_tokens(
    tmp_path: Path, chat: ChatFormat
) -> None:
    report = _check(_write(tmp_path, CHAT), chat=chat)
    ((context, answer),) = report.sample
    assert context.text == chat.text(chat.prompt([USER]))
    assert (answer.text, answer.trained) == ("It is 84.<|im_end|>", True)
    assert report.trained_tokens == len(chat._encode("It is 84.")) + 1
    assert report.tokens == len(chat.prompt([USER])) + report.trained_tokens


@pytest.mark.parametrize(
    ("rule", "counts"),
    [("refuse", (1, 0, 0, 1)), ("drop", (1, 0, 1, 0)), ("truncate-right", (2, 1, 0, 0))],
)
def test_the_length_rule_is_counted(
    tmp_path: Path, chat: ChatFormat, rule: Any, counts: tuple[int, ...]
) -> None:
    long = {"messages": [USER, {**GOOD, "content": "It is 84. " * 9}]}
    bound = len(chat.prompt([USER])) + 12
    report = _check(_write(tmp_path, CHAT, long), chat=chat, max_length=bound, too_long=rule)
    found = (report.accepted, report.truncated, report.dropped, report.rejected)
    assert found == counts
    assert report.lengths is not None
    assert report.lengths.longest > bound  # before the rule


def test_order_statistics_and_histogram() -> None:
    lengths = describe(Counter({10: 1, 20: 2, 30: 6, 120: 1}))
    assert (lengths.shortest, lengths.median, lengths.percentile_95, lengths.longest) == (
        *(10, 30, 120),
        120,
    )
    assert [(b.first, b.last, b.rows) for b in lengths.histogram if b.rows] == [
        (1, 10, 1),
        (11, 20, 2),
        (21, 30, 6),
        (111, 120, 1),
    ]
    assert sum(bucket.rows for bucket in lengths.histogram) == 10
    one = describe(Counter({5: 3}))
    assert sum(bucket.rows for bucket in one.histogram) == 3


def _run(*arguments: str) -> tuple[int, list[Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "algorithms.data", "check", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_as_a_process_it_writes_json_and_exits_by_what_it_found(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    chatml.save_pretrained(tmp_path / "tokenizer")
    path = _write(tmp_path, PAIR, {"messages": "x"})
    code, lines, _ = _run(
        *(str(path), "--algorithm", "dpo", "--tokenizer", str(tmp_path / "tokenizer"))
    )
    assert code == 1
    progress, report = lines[-2]["progress"], lines[-1]["report"]
    assert progress == {"rows": 2, "bytes": path.stat().st_size, "total": path.stat().st_size}
    assert (report["accepted"], report["rejected"]) == (1, 1)
    assert [len(sequence) for sequence in report["sample"]] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rows", "--algorithm", "grpo"], "'grpo' trains on its own samples"),
        (["rows", "--algorithm", "abc"], "'abc' is unknown; use one of: dpo, kto"),
        (["rows", "--tokenizer", "nowhere"], "no folder 'nowhere'"),
        (["empty"], "the file is empty"),
    ],
)
def test_what_cannot_be_checked_is_told(tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "empty").write_text("")
    _write(tmp_path, CHAT).rename(tmp_path / "rows")
    file, *options = arguments
    asked = parser().parse_args(["check", str(tmp_path / file), *options])
    with pytest.raises((Unusable, FileFault), match=says):
        check_file(asked, io.StringIO())
