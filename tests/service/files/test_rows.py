"""Cases B07 and B11: each row of an upload is checked, and a line ends at the byte `\\n` only."""

import json
from pathlib import Path

import pytest

from service.files.rows import Report, check_rows
from tests.service.spec.rows.parquet_files import write_parquet

GOOD = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


def check(tmp_path: Path, content: bytes | str, max_line_bytes: int = 1000) -> Report:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return check_rows(path, max_row_bytes=max_line_bytes)


def row(content: str) -> str:
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "b"}]
    return json.dumps({"messages": messages}, ensure_ascii=False)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_b07_other_line_separators_are_part_of_the_text(tmp_path: Path, separator: str) -> None:
    # The last three are control characters, which JSON wants escaped; then they are no separator.
    escaped = json.dumps(separator)[1:-1] if separator < " " else separator
    text = row("one two").replace(" two", f"{escaped}two")
    report = check(tmp_path, f"{text}\n{GOOD}\n")
    assert (report.rows, report.problems) == (2, [])


@pytest.mark.parametrize(
    "content",
    [
        f"{GOOD}\r\n{GOOD}\r\n",
        f"\ufeff{GOOD}\n{GOOD}\n",
        f"{row('😀 \\ud83d\\ude00')}\n{GOOD}",
        f"{GOOD}\n{GOOD}",
    ],
    ids=["crlf", "byte order mark", "emoji, raw and escaped", "no line end at the end"],
)
def test_b07_accepted(tmp_path: Path, content: str) -> None:
    report = check(tmp_path, content)
    assert (report.rows, report.problems) == (2, [])


def test_b07_a_lone_surrogate_is_refused_with_its_line(tmp_path: Path) -> None:
    bad = GOOD.replace('"a"', '"\\ud83d"')
    report = check(tmp_path, f"{GOOD}\n{bad}\n")
    assert [p.field for p in report.problems] == ["line 2"]
    assert "lone surrogate" in report.problems[0].message


def test_b07_a_line_of_20_mib_is_refused_and_the_next_is_read(tmp_path: Path) -> None:
    mib = 1024 * 1024
    report = check(tmp_path, f"{row('x' * 20 * mib)}\n{GOOD}\n", max_line_bytes=8 * mib)
    assert report.rows == 1
    assert [p.field for p in report.problems] == ["line 1"]
    assert str(8 * mib) in report.problems[0].message


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_the_longest_line_is_exact(tmp_path: Path, extra: int) -> None:
    limit = len(GOOD)
    for prefix in (b"", b"\xef\xbb\xbf"):
        report = check(tmp_path, prefix + GOOD.encode() + b"\n", max_line_bytes=limit + extra)
        assert report.bad_rows == (1 if extra < 0 else 0)


def test_b11_a_cut_last_line_is_refused_with_its_number(tmp_path: Path) -> None:
    report = check(tmp_path, f"{GOOD}\n{GOOD}\n{GOOD[:30]}")
    assert [p.field for p in report.problems] == ["line 3"]
    assert "cut off" in report.problems[0].message


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"messages": "text"}', "`messages` is a string, not a list"),
        ('{"messages": []}', "`messages` is empty"),
        ('{"prompt": "a"}', "no known format has the row's fields (`prompt`)"),
        ('{"text": "a"}', "no known format has the row's fields (`text`)"),
        ('{"chosen": "a", "rejected": "b", "prompt": "c"}', "another kind"),
        ("[1]", "a list, not an object"),
        ("", "blank"),
        ('{"messages": [1]}', "`messages[0]` is a number"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "nothing to train on"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "'robot'"),
        ('{"messages": [{"role": "assistant", "content": 3}]}', "`messages[0].content`"),
        ('{"messages": [{"role": "assistant"}]}', "content` is missing"),
        ('{"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}', "names no function"),
        ('{"messages": [{"role": "user", "content": "a", "tool_calls": []}]}', "role user"),
        ('{"messages": NaN}', "NaN is no JSON number"),
        ('{"messages": [], "x": 1e999}', "out of range"),
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, "a number has too many digits"),
    ],
)
def test_b11_wrong_rows_say_what_is_wrong(tmp_path: Path, line: str, says: str) -> None:
    report = check(tmp_path, f"{GOOD}\n{line}\n{GOOD}\n", max_line_bytes=200_000)
    assert report.rows == 2
    assert [p.field for p in report.problems] == ["line 2"]
    assert says in report.problems[0].message


def test_b11_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    report = check(tmp_path, GOOD.encode().replace(b'"a"', b'"\xff"') + b"\n")
    assert "not UTF-8 at byte" in report.problems[0].message


@pytest.mark.parametrize("content", ["", "\ufeff", "   "])
def test_b11_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    report = check(tmp_path, content)
    assert [p.message for p in report.problems] == ["the file is empty"]


def test_b11_the_first_20_bad_lines_are_listed(tmp_path: Path) -> None:
    report = check(tmp_path, "{}\n" * 30)
    assert [p.field for p in report.problems] == [f"line {n}" for n in range(1, 21)]
    assert report.bad_rows == 30


def test_tool_calls_may_stand_for_content(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"x": "1 + 1"}}}
    messages = [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    report = check(tmp_path, json.dumps({"messages": messages, "tools": []}) + "\n")
    assert (report.rows, report.problems) == (1, [])


def test_rows_of_two_kinds_are_for_two_files(tmp_path: Path) -> None:
    pair = '{"prompt": "a", "chosen": "b", "rejected": "c"}'
    report = check(tmp_path, f"{GOOD}\n{pair}\n{GOOD}\n")
    (problem,) = report.problems
    assert problem.field == "line 2"
    assert "another kind (chosen and rejected: preference) than line 1 (OpenAI chat" in (
        problem.message
    )


def test_a_json_array_is_checked_by_its_rows(tmp_path: Path) -> None:
    report = check(tmp_path, f'[{GOOD}, {{"messages": "text"}}, {GOOD}]')
    assert report.rows == 2
    assert [p.field for p in report.problems] == ["row 2"]


def test_parquet_is_checked_by_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    good = json.loads(GOOD)
    write_parquet(path, [good, {"messages": []}, good])
    report = check_rows(path, max_row_bytes=1000)
    assert report.rows == 2
    assert [(p.field, p.message) for p in report.problems] == [("row 2", "`messages` is empty")]
