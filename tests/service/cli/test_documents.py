"""Job files: YAML 1.2, so that numbers are numbers and words are words."""

from pathlib import Path
from typing import Any

import pytest

from service.cli.documents import BadDocument, read_document


def read(tmp_path: Path, text: str | bytes) -> dict[str, Any]:
    path = tmp_path / "job.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_document(path)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("-3.", -3.0),
        ("3", 3),
        ("-0", 0),
        ("007", 7),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2026-01-01", "2026-01-01"),
        ("0x10", "0x10"),
        ("e5", "e5"),
        ("'1e-5'", "1e-5"),
        ("[1e-5, 2]", [1e-5, 2]),
        ("{a: 1e-5}", {"a": 1e-5}),
    ],
)
def test_scalars_are_read_as_json_would(tmp_path: Path, written: str, value: Any) -> None:
    found = read(tmp_path, f"x: {written}\n")["x"]
    assert found == value
    assert type(found) is type(value)


def test_json_anchors_merges_and_a_byte_order_mark(tmp_path: Path) -> None:
    assert read(tmp_path, '{"a": {"b": [1, 2.5e-3, null]}}') == {"a": {"b": [1, 0.0025, None]}}
    assert read(tmp_path, "\ufeffa: &x {b: 1}\nc: {<<: *x, d: 2}\n")["c"] == {"b": 1, "d": 2}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\na: 2\n", "line 2, column 1: the key 'a' occurs twice"),
        ("a:\n  b: 1\n  b: 2\n", "line 3, column 3"),
        ("a: [1, 2\n", "line 2"),
        ("1: x\n", "is no string"),
        ("- a\n", "no mapping"),
        ("", "no mapping"),
        ("a: 1e999\n", "out of range"),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
        ("a: !!python/object/apply:os.system ['touch x']\n", "could not determine a constructor"),
        (b"a: \xff\n", "not UTF-8 at byte 4"),
        ("a: \x01\n", "special characters are not allowed"),
        ("x: " + "y" * 2_000_000, "larger than"),
        ("x: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ('a: 1\nx: ["\\ud800"]', "line 2, column 5: the text holds half of a surrogate pair"),
        ("x: " + "9" * 5000, "line 1, column 4: the number has too many digits"),
    ],
)
def test_what_is_no_job_file_says_where_and_why(
    tmp_path: Path, text: str | bytes, says: str
) -> None:
    with pytest.raises(BadDocument) as caught:
        read(tmp_path, text)
    assert says in str(caught.value)
    assert "job.yaml" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadDocument, match="No such file"):
        read_document(tmp_path / "missing.yaml")
