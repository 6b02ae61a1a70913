from pathlib import Path

from service.launchers import Observation, Phase
from service.launchers.kuberay.record import Record
from service.spec import Reason


def test_a_folder_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    record = Record(tmp_path / "attempts/1")
    assert not record.is_shut_out
    assert not record.ran_out_of_memory
    assert record.head() is None
    assert record.verdict() is None
    assert not record.path.exists()


def test_an_attempt_is_shut_out_for_good(tmp_path: Path) -> None:
    record = Record(tmp_path / "attempts/1")
    record.shut_out()
    record.shut_out()
    assert Record(record.path).is_shut_out
    assert [path.name for path in record.path.iterdir()] == ["shut-out"]


def test_the_first_verdict_stays(tmp_path: Path) -> None:
    record = Record(tmp_path / "attempts/1")
    first = Observation(
        phase=Phase.EXITED, exit_signal=9, reason=Reason.OUT_OF_MEMORY, evidence="ünder pressure"
    )
    assert record.keep_verdict(first) == first
    assert record.keep_verdict(Observation(phase=Phase.EXITED, exit_code=0)) == first
    assert Record(record.path).verdict() == first


def test_a_head_that_is_only_just_written_is_none_yet(tmp_path: Path) -> None:
    (tmp_path / "head").touch()
    assert Record(tmp_path).head() is None
    (tmp_path / "head").write_text("uid-1\n")
    assert Record(tmp_path).head() == "uid-1"
