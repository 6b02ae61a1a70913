from pathlib import Path

import pytest

from service.reconciler.spool import last_words, spooled
from service.spec import WorkerEvent


def line(seq: int) -> str:
    return WorkerEvent(seq=seq, time=0.0, kind="started").model_dump_json() + "\n"


def seqs(path: Path, after: int = 0) -> list[int]:
    return [event.seq for batch in spooled(path, after_seq=after) for event in batch]


def test_a_spool_is_read_from_where_the_service_stands(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert seqs(path) == []
    path.write_text("".join(line(seq) for seq in range(1, 1203)))
    assert seqs(path) == list(range(1, 1203))
    assert seqs(path, 1200) == [1201, 1202]
    assert [len(batch) for batch in spooled(path, after_seq=0)] == [500, 500, 202]


@pytest.mark.parametrize("rest", ['{"seq": 3, "ti', "\n", "[]\n", "\xff\n", '{"seq": 3}\n'])
def test_a_spool_ends_before_what_is_no_event(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(line(1) + line(2) + rest, encoding="latin-1")
    assert seqs(path) == [1, 2]


def test_the_end_of_a_log_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_words(log) == ""
    log.write_bytes(b"x" * 5000 + b"\xff the end\n")
    words = last_words(log)
    assert words.endswith("\ufffd the end")
    assert len(words) < 2001
