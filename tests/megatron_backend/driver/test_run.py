"""What happens while an attempt is put away does not change how it ended.

Training and the ranks are stand-ins here; all around them is what a driver runs.
"""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from algorithms.errors import JobFailure
from megatron_backend.driver import ranks, run
from megatron_backend.driver.metrics import MetricsServer
from megatron_backend.driver.recorder import SpoolRecorder
from service.spec import Outcome, Reason
from tests.megatron_backend.driver import tiny_job

NAN = JobFailure(Reason.NAN_LOSS, "the loss is no number")

pytestmark = pytest.mark.usefixtures("own_signals")


def tell() -> None:
    """What a machine that is taken back is sent."""
    os.kill(os.getpid(), signal.SIGTERM)


def nothing() -> None:
    pass


class Attempt:
    """The first attempt of a job, and what happens in it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.training: Callable[[], None] = nothing
        self.ranks_stop: Callable[[], None] = nothing
        self.recorder_close: Callable[[], None] = nothing
        self.closed: list[str] = []
        self._folder = tiny_job.write_job(folder / "job")
        close_recorder, close_server = SpoolRecorder.close, MetricsServer.close

        @contextmanager
        def open_ranks(*_: object) -> Iterator[None]:
            try:
                yield
            finally:
                self.ranks_stop()

        def closing_recorder(recorder: SpoolRecorder) -> None:
            close_recorder(recorder)
            self.closed.append("recorder")
            self.recorder_close()

        def closing_server(server: MetricsServer) -> None:
            close_server(server)
            self.closed.append("server")

        monkeypatch.setattr(ranks, "open_ranks", open_ranks)
        monkeypatch.setattr(run, "set_environment", lambda _: None)
        monkeypatch.setattr(run, "_train", lambda *_: self.training())
        monkeypatch.setattr(SpoolRecorder, "close", closing_recorder)
        monkeypatch.setattr(MetricsServer, "close", closing_server)

    def train_in_vain(self) -> None:
        raise NAN

    def lose_the_disk(self) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    def outcome(self) -> Outcome:
        """Runs it to its end."""
        run.run_attempt(self._folder, 1)
        return tiny_job.outcome(self._folder)


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    return Attempt(tmp_path, monkeypatch)


@pytest.mark.parametrize("moment", ["ranks_stop", "recorder_close"])
def test_a_signal_after_a_good_end_does_not_change_it(attempt: Attempt, moment: str) -> None:
    setattr(attempt, moment, tell)
    assert attempt.outcome().status == "succeeded"
    assert attempt.closed == ["recorder", "server"]


@pytest.mark.parametrize("moment", ["ranks_stop", "recorder_close"])
def test_a_signal_after_a_failure_does_not_change_it(attempt: Attempt, moment: str) -> None:
    attempt.training = attempt.train_in_vain
    setattr(attempt, moment, tell)
    assert attempt.outcome().reason is Reason.NAN_LOSS
    assert attempt.closed == ["recorder", "server"]


def test_a_signal_after_a_failure_before_training_does_not_change_it(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise JobFailure(Reason.USER_ERROR, "no such tokenizer")

    monkeypatch.setattr(run, "check_tokenizers", refuse)
    attempt.recorder_close = tell
    assert attempt.outcome().reason is Reason.USER_ERROR


def test_a_signal_during_training_ends_it(attempt: Attempt) -> None:
    attempt.training = tell
    outcome = attempt.outcome()
    assert outcome.reason is Reason.PREEMPTED
    assert outcome.message == "stopped by SIGTERM"


def test_a_disk_that_fails_at_the_end_does_not_hide_why_it_ended(attempt: Attempt) -> None:
    attempt.training, attempt.recorder_close = attempt.train_in_vain, attempt.lose_the_disk
    assert attempt.outcome().reason is Reason.NAN_LOSS
    assert attempt.closed == ["recorder", "server"]


def test_a_good_end_whose_events_are_not_on_disk_is_none(attempt: Attempt) -> None:
    attempt.recorder_close = attempt.lose_the_disk
    assert attempt.outcome().reason is Reason.NODE_FAILURE
    assert attempt.closed == ["recorder", "server"]
