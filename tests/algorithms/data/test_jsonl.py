import json
from pathlib import Path

import pytest

from algorithms.data.jsonl import RowError, read_jsonl


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_b07_only_the_newline_byte_ends_a_record(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d\x0be\x0cf 😀"
    row = json.dumps({"text": text}, ensure_ascii=False).encode()
    path = _file(tmp_path / "rows.jsonl", b"\xef\xbb\xbf" + row + b"\r\n\r\n" + row)
    assert list(read_jsonl(path)) == [(1, {"text": text}), (3, {"text": text})]


def test_b07_a_surrogate_pair_is_fine_and_half_of_one_is_not(tmp_path: Path) -> None:
    good = _file(tmp_path / "good.jsonl", b'{"text": "\\ud83d\\ude00 and \\\\ud83d"}\n')
    assert list(read_jsonl(good)) == [(1, {"text": "😀 and \\ud83d"})]
    bad = _file(tmp_path / "bad.jsonl", b'{"a": 1}\n{"text": "\\uD83d"}\n')
    with pytest.raises(RowError, match="line 2: a lone surrogate") as caught:
        list(read_jsonl(bad))
    assert caught.value.line == 2


def test_b07_a_line_that_is_too_long_is_refused_without_being_read_whole(tmp_path: Path) -> None:
    long = b'{"text": "' + b"x" * (20 * 2**20) + b'"}\n'
    path = _file(tmp_path / "rows.jsonl", b'{"a": 1}\n' + long)
    with pytest.raises(RowError, match="line 2: longer than 16777216 bytes"):
        list(read_jsonl(path))


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
def test_the_bound_counts_the_record_and_not_its_end(tmp_path: Path, ending: bytes) -> None:
    path = _file(tmp_path / "rows.jsonl", b'{"a": 12}' + ending)
    assert list(read_jsonl(path, max_line_bytes=9)) == [(1, {"a": 12})]
    with pytest.raises(RowError, match="longer than 8 bytes"):
        list(read_jsonl(path, max_line_bytes=8))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"messages": [', "not valid JSON"),
        (b'"text"', "must be a JSON object, not str"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_b11_a_bad_line_is_named(tmp_path: Path, line: bytes, problem: str) -> None:
    path = _file(tmp_path / "rows.jsonl", b'{"a": 1}\n\n' + line)
    with pytest.raises(RowError, match=f"line 3: .*{problem}"):
        list(read_jsonl(path))
