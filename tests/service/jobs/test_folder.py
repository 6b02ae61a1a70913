import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.jobs import AttemptFolder, JobFolder
from service.spec import JobContext, Reason
from tests.service.store.sample_jobs import context, document


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    return JobFolder(tmp_path / "job")


def test_a_driver_finds_its_context_as_it_was_stored(folder: JobFolder) -> None:
    resolved = context(document())
    folder.write_context(resolved)
    folder.write_context(resolved)
    text = (folder.path / "context.json").read_text(encoding="utf-8")
    assert JobContext.model_validate_json(text) == resolved


def test_the_endpoint_is_replaced_whole(folder: JobFolder) -> None:
    folder.write_endpoint("http://127.0.0.1:8000")
    folder.write_endpoint("http://127.0.0.1:9")
    assert (folder.path / "endpoint").read_text(encoding="utf-8").strip() == "http://127.0.0.1:9"
    assert [path.name for path in folder.path.iterdir()] == ["endpoint"]


def test_a_token_is_made_once_and_only_its_owner_may_read_it(folder: JobFolder) -> None:
    attempt = folder.attempt(1)
    with ThreadPoolExecutor(6) as threads:
        tokens = set(threads.map(lambda _: attempt.make_token(), range(6)))
    assert len(tokens) == 1
    assert tokens == {attempt.make_token()}
    assert len(tokens.pop()) >= 32
    assert stat.S_IMODE(attempt.token_path.stat().st_mode) == 0o600
    assert folder.attempt(2).make_token() != attempt.make_token()
    assert [path.name for path in attempt.path.iterdir()] == ["token"]


def test_the_first_reason_to_stop_stays(folder: JobFolder) -> None:
    attempt = folder.attempt(1)
    attempt.write_stop(Reason.TIMEOUT)
    attempt.write_stop(Reason.CANCELLED)
    assert (attempt.path / "stop").read_text() == "TIMEOUT\n"


def test_a_fence_never_goes_down(folder: JobFolder) -> None:
    assert folder.fence() == 0
    numbers = [3, 1, 7, 2, 5, 7, 4]
    with ThreadPoolExecutor(len(numbers)) as threads:
        list(threads.map(folder.raise_fence, numbers))
    assert folder.fence() == 7
    folder.raise_fence(6)
    assert folder.fence() == 7


def test_an_attempt_has_its_places(folder: JobFolder) -> None:
    attempt = folder.attempt(3)
    assert attempt == AttemptFolder(folder.path / "attempts" / "3")
    names = [attempt.events_path.name, attempt.log_path.name, attempt.outcome_path.name]
    assert names == ["events.jsonl", "log", "outcome.json"]
    assert folder.checkpoints_path == folder.path / "checkpoints"
    assert folder.exports_path == folder.path / "exports"


def test_an_outcome_is_read_missed_or_refused(folder: JobFolder) -> None:
    attempt = folder.attempt(1)
    assert attempt.outcome() is None
    attempt.path.mkdir(parents=True)
    attempt.outcome_path.write_text(
        '{"attempt": 1, "status": "failed", "reason": "NAN_LOSS", "message": "step 3"}'
    )
    outcome = attempt.outcome()
    assert outcome is not None
    assert (outcome.reason, outcome.message) == ("NAN_LOSS", "step 3")
    for broken in ("", '{"attempt": 1', '{"attempt": 1, "status": "perhaps"}', "\ud800"):
        attempt.outcome_path.write_text(broken, errors="surrogatepass")
        with pytest.raises(ValueError, match=r"outcome\.json"):
            attempt.outcome()
