"""Question files: where they may lie, and what a bad one is told."""

import json
import os
from pathlib import Path

import pytest

from environments.question_files import (
    MAX_ROW_BYTES,
    ROOTS_VARIABLE,
    QuestionFileError,
    read_rows,
    resolve,
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (root / "q.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "outside.jsonl").write_text('{"a": 2}\n')
    monkeypatch.setenv(ROOTS_VARIABLE, str(root))
    return root


def test_files_under_a_root_are_found(root: Path) -> None:
    assert resolve("q.jsonl") == root / "q.jsonl"
    assert resolve(str(root / "q.jsonl")) == root / "q.jsonl"


def test_the_second_root_is_looked_at_too(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "r.jsonl").write_text('{"a": 1}\n')
    monkeypatch.setenv(ROOTS_VARIABLE, f"{root}{os.pathsep}{other}")
    assert resolve("r.jsonl") == other / "r.jsonl"


@pytest.mark.parametrize(
    "path",
    [
        "../outside.jsonl",
        "/etc/passwd",
        "link.jsonl",
        "ring.jsonl",
        ".",
        "folder",
        "pipe",
        "missing.jsonl",
        "q.jsonl/../../outside.jsonl",
        "a\0b",
        "x" * 4000,
        "%2e%2e/outside.jsonl",
        "..\\outside.jsonl",
    ],
)
def test_nothing_else_is(root: Path, path: str) -> None:
    (root / "folder").mkdir()
    (root / "link.jsonl").symlink_to(root.parent / "outside.jsonl")
    (root / "ring.jsonl").symlink_to(root / "ring.jsonl")
    os.mkfifo(root / "pipe")
    with pytest.raises(QuestionFileError):
        resolve(path)
    with pytest.raises(QuestionFileError):
        resolve(str(root / path))


def test_an_empty_list_of_roots_allows_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOTS_VARIABLE, "")
    for path in ("q.jsonl", str(root / "q.jsonl")):
        with pytest.raises(QuestionFileError, match="any folder"):
            resolve(path)


def test_what_lies_outside_is_refused_alike_whether_it_is_there_or_not(root: Path) -> None:
    answers = set()
    for path in ("/etc/passwd", "/etc/missing", str(root.parent / "outside.jsonl")):
        with pytest.raises(QuestionFileError) as raised:
            resolve(path)
        answers.add(str(raised.value))
    assert answers == {f"no file at this path under the data roots ({root})"}


def test_without_roots_a_path_must_be_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ROOTS_VARIABLE, raising=False)
    file = tmp_path / "q.jsonl"
    file.write_text("{}\n")
    assert resolve(str(file)) == file
    monkeypatch.chdir(tmp_path)
    with pytest.raises(QuestionFileError, match="absolute"):
        resolve("q.jsonl")
    with pytest.raises(QuestionFileError, match=r"\.\."):
        resolve(f"{tmp_path}/../{tmp_path.name}/q.jsonl")


def test_b07_only_newlines_end_rows(tmp_path: Path) -> None:
    rows = [{"a": "x\u2028y\u2029z\u0085"}, {"a": "🦆"}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    file = tmp_path / "q.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\n\n")
    assert list(read_rows(file)) == rows


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (b"secret {", "line 2 is not JSON"),
        (b"[1]", "line 2 is not a JSON object"),
        (b'{"a": "\xff"}', "line 2 is not UTF-8"),
        (b'{"a": "\\ud800"}', "line 2 is not UTF-8"),
        (b"[" * 100_000, "line 2 is not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "line 2 is not JSON"),
        (b'{"a": "' + b"x" * MAX_ROW_BYTES + b'"}', "line 2 is longer"),
    ],
)
def test_a_bad_line_is_named_but_not_quoted(tmp_path: Path, second: bytes, message: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_bytes(b'{"a": 1}\n' + second + b'\n{"a": 3}\n')
    with pytest.raises(QuestionFileError, match=message) as raised:
        read_rows(file)
    assert "secret" not in str(raised.value)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_bytes(b"\n\n")
    with pytest.raises(QuestionFileError, match="no rows"):
        read_rows(file)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"a": 1}\n')
    assert read_rows(file) == ({"a": 1},)
    file.write_text('{"a": 1}\n{"a": 2}\n')
    assert read_rows(file) == ({"a": 1}, {"a": 2})
