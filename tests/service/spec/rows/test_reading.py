"""JSON Lines, JSON arrays and Parquet come out as the same rows, and faults with their place."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.spec.rows import FileFault, RowError, RowFault, RowFile, json_array
from tests.service.spec.rows.parquet_files import write_parquet

ROOT = Path(__file__).parents[4]


def _write(folder: Path, content: bytes | str) -> Path:
    path = folder / "rows"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _read(path: Path, **options: Any) -> list[tuple[str, Any]]:
    """Place and row of each, or what is wrong with it."""
    return [
        (row.place, row.fields.message if isinstance(row.fields, RowFault) else row.fields)
        for row in RowFile(path, **options)
    ]


def test_b07_only_the_newline_byte_ends_a_record(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d\x0be\x0cf 😀"
    row = json.dumps({"text": text}, ensure_ascii=False).encode()
    path = _write(tmp_path, b"\xef\xbb\xbf" + row + b"\r\n" + row)
    assert _read(path) == [("line 1", {"text": text}), ("line 2", {"text": text})]


def test_b07_half_of_a_surrogate_pair_is_refused_with_its_line(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        '{"text": "\\ud83d\\ude00 and \\\\ud83d"}\n{"text": "\\uD83d"}\n{"text": "x"}\n',
    )
    (_, good), (place, fault), last = _read(path)
    assert good == {"text": "😀 and \\ud83d"}
    assert (place, "lone surrogate" in fault) == ("line 2", True)
    assert last == ("line 3", {"text": "x"})


def test_b07_a_line_of_20_mib_is_refused_without_being_held(tmp_path: Path) -> None:
    long = b'{"text": "' + b"x" * (20 * 2**20) + b'"}\n'
    path = _write(tmp_path, b'{"a": 1}\n' + long + b'{"a": 2}')
    assert _read(path) == [
        ("line 1", {"a": 1}),
        ("line 2", "the line is longer than 16777216 bytes"),
        ("line 3", {"a": 2}),
    ]


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
def test_the_bound_counts_the_record_and_not_its_end(tmp_path: Path, ending: bytes) -> None:
    path = _write(tmp_path, b'{"a": 12}' + ending)
    assert _read(path, max_row_bytes=9) == [("line 1", {"a": 12})]
    ((_, fault),) = _read(path, max_row_bytes=8)
    assert fault == "the line is longer than 8 bytes"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"messages": [', "the file ends in this line, so the upload may be cut off"),
        (b'"text"', "the row is a string, not an object"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": 1, "a": 2}', "occurs twice"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_b11_a_bad_line_is_named_and_a_job_stops_at_it(
    tmp_path: Path, line: bytes, problem: str
) -> None:
    path = _write(tmp_path, b'{"a": 1}\n{"a": 2}\n' + line)
    place, fault = _read(path)[2]
    assert (place, problem in fault) == ("line 3", True)
    with pytest.raises(RowError, match=r"^line 3: ") as caught:
        [row.unwrap() for row in RowFile(path)]
    assert caught.value.place == "line 3"


def test_b11_a_blank_line_is_named(tmp_path: Path) -> None:
    path = _write(tmp_path, '{"a": 1}\n\n{"a": 2}\n')
    assert _read(path)[1] == ("line 2", "the line is blank")


@pytest.mark.parametrize("content", ["", "\ufeff", " \n".strip("\n"), "[]", " [\n] \n"])
def test_b11_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(FileFault, match="the file is empty"):
        _read(_write(tmp_path, content))


@pytest.mark.parametrize(
    ("first", "name"), [(b"\x1f\x8b\x08", "gzip"), (b"PK\x03\x04", "zip"), (b"(\xb5/\xfd", "zstd")]
)
def test_a_compressed_file_is_named(tmp_path: Path, first: bytes, name: str) -> None:
    with pytest.raises(FileFault, match=f"compressed \\({name}\\)"):
        _read(_write(tmp_path, first + b"xxxx"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(
    rows=st.lists(st.dictionaries(st.text(max_size=4), json_values, max_size=3), min_size=1),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
    piece=st.integers(1, 40),
)
def test_an_array_is_cut_where_json_cuts_it_wherever_pieces_end(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, Any]],
    indent: int | None,
    ascii_only: bool,
    piece: int,
) -> None:
    path = tmp_path_factory.mktemp("array") / "rows.json"
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    path.write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "PIECE_BYTES", piece)
        with path.open("rb") as file:
            found = list(json_array.rows(file, 10_000))
    assert found == list(enumerate(rows, start=1))


def test_an_array_s_faults_have_their_row(tmp_path: Path) -> None:
    path = _write(tmp_path, '\ufeff[{"a": 1},\n {"a" 2},\n [3],\n {"a": "' + "x" * 50 + '"}, {}]')
    found = _read(path, max_row_bytes=40)
    assert [place for place, _ in found] == [f"row {n}" for n in range(1, 6)]
    assert found[0][1] == {"a": 1}
    assert "not JSON" in found[1][1]
    assert "the row is a list" in found[2][1]
    assert "longer than 40 bytes" in found[3][1]
    assert found[4][1] == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"a": 1}, {"a": 2', "may be cut off"),
        ('[{"a": 1},', "may be cut off"),
        ('[{"a": 1}] [', "something follows"),
        ('[{"a": 1},]', "not JSON"),
    ],
)
def test_b11_an_array_that_does_not_end_well(tmp_path: Path, text: str, problem: str) -> None:
    found = _read(_write(tmp_path, text))
    assert found[0] == ("row 1", {"a": 1})
    assert problem in found[1][1]
    assert found[1][0] == "row 2"


@pytest.mark.parametrize("form", ["lines", "array", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, form: str) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{n} " * 2000}]} for n in range(400)]
    paths = []
    for times in (1, 6):  # rows of 8 kB
        path = tmp_path / f"{form}-{times}"
        if form == "parquet":
            write_parquet(path, rows * times, group=100)
        else:
            text = map(json.dumps, rows * times)
            path.write_text("\n".join(text) if form == "lines" else "[" + ",".join(text) + "]")
        paths.append(str(path))
    command = [sys.executable, "-m", "tests.service.spec.rows.peak_memory", *paths]
    small, large = json.loads(subprocess.check_output(command, cwd=ROOT))
    assert large < 1.5 * small


def test_parquet_s_rows_have_no_nulls(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "score": 1.0},
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
                }
            ],
            "score": float("nan"),
        },
    ]
    path = tmp_path / "rows.parquet"
    write_parquet(path, rows)
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    assert _read(path) == [
        ("row 1", rows[0]),
        ("row 2", {"messages": [{"role": "assistant", "tool_calls": [call]}]}),
    ]


@pytest.mark.parametrize("lost", [1, 40, 400])
def test_b11_a_damaged_parquet_file_is_refused(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "rows.parquet"
    write_parquet(path, [{"prompt": "a", "completion": str(n)} for n in range(100)])
    path.write_bytes(path.read_bytes()[:-lost])
    found = _read(path)
    assert found[-1][0] == f"row {len(found)}"
    assert "cannot be read on" in found[-1][1]
