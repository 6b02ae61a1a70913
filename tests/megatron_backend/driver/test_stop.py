"""Signals to a driver: what it makes of the first, the second, and of no time left."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from algorithms.errors import JobFailure
from megatron_backend.driver.outcome import Stopped
from megatron_backend.driver.stop import StopSignal, cluster_bounds
from service.spec import Reason


@pytest.fixture
def stop(tmp_path: Path) -> Iterator[StopSignal]:
    """Installed; the handlers of before are put back."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    stop = StopSignal(tmp_path)
    stop.install()
    yield stop
    stop.ignore()
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGTERM, "PREEMPTED"), (signal.SIGUSR1, "TIMEOUT")]
)
def test_a_driver_that_trains_may_finish(
    stop: StopSignal, number: signal.Signals, reason: str
) -> None:
    assert stop.failure() is None
    with stop.finishing(3600.0):
        send(number)
        failure = stop.failure()
    assert failure is not None
    assert failure.reason == reason
    assert f"stopped by {number.name}; the step" in str(failure)
    assert stop.cause(failure) is failure


@pytest.mark.parametrize("reason", [Reason.TIMEOUT, Reason.PREEMPTED])
def test_the_service_says_why(stop: StopSignal, tmp_path: Path, reason: Reason) -> None:
    (tmp_path / "stop").write_text(f"{reason}\n")
    with stop.finishing(3600.0):
        send(signal.SIGTERM)
    failure = stop.failure()
    assert failure is not None
    assert failure.reason is reason


def test_a_users_cancel_waits_for_nothing(stop: StopSignal, tmp_path: Path) -> None:
    (tmp_path / "stop").write_text("CANCELLED\n")
    with pytest.raises(Stopped) as caught, stop.finishing(3600.0):
        send(signal.SIGTERM)
    assert caught.value.reason is Reason.CANCELLED


def test_before_and_after_training_there_is_nothing_to_finish(stop: StopSignal) -> None:
    with stop.finishing(3600.0):
        pass
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        send(signal.SIGTERM)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_ends_at_once(
    stop: StopSignal, second: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_backend.driver.stop.ECHO_SECONDS", 0.0)
    with stop.finishing(3600.0):
        send(signal.SIGUSR1)
        with pytest.raises(Stopped) as caught:
            send(second)
    assert caught.value.reason is Reason.TIMEOUT  # of the first


def test_the_grace_ends(stop: StopSignal) -> None:
    with stop.finishing(0.2):
        send(signal.SIGTERM)
        with pytest.raises(Stopped, match="stopped by SIGTERM") as caught:
            time.sleep(60)
    assert caught.value.reason is Reason.PREEMPTED


def test_no_grace_at_all(stop: StopSignal) -> None:
    with pytest.raises(Stopped), stop.finishing(0.0):
        send(signal.SIGTERM)


def test_what_ended_the_driver(stop: StopSignal) -> None:
    """Ray turns what is raised inside its calls into errors of its own."""
    bug, exit_ = KeyError("x"), SystemExit(143)
    assert stop.cause(bug) is bug
    by_ray = stop.cause(exit_)  # Ray's own handler was in place
    assert isinstance(by_ray, Stopped)
    assert by_ray.reason is Reason.PREEMPTED
    with stop.finishing(3600.0):
        send(signal.SIGTERM)
    inside_ray = stop.cause(SystemError("returned a result with an exception set"))
    assert isinstance(inside_ray, Stopped)
    other = JobFailure(Reason.USER_ERROR, "line 3")
    assert stop.cause(other) is other
    scorers = JobFailure(Reason.ENVIRONMENT_ERRORS, "every scorer's process was ended")
    assert stop.cause(scorers) is inside_ray  # by the same signal


@pytest.mark.parametrize(
    ("number", "variable"),
    [(signal.SIGTERM, "PLANISH_GRACE_SECONDS"), (signal.SIGUSR1, "PLANISH_SIGNAL_SECONDS")],
)
def test_the_cluster_bounds_the_time_after_each_signal(
    stop: StopSignal, number: signal.Signals, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("PLANISH_GRACE_SECONDS", "PLANISH_SIGNAL_SECONDS"):
        monkeypatch.setenv(other, "3600")
    monkeypatch.setenv(variable, "0.2")
    with stop.finishing(3600.0, cluster_bounds()):
        send(number)
        with pytest.raises(Stopped, match=f"stopped by {number.name}"):
            time.sleep(60)


@pytest.mark.parametrize(
    ("end_in_seconds", "reason"),
    [(3600, "PREEMPTED"), (400, "TIMEOUT"), (-60, "TIMEOUT"), (None, "TIMEOUT")],
)
def test_usr1_long_before_slurms_limit_is_a_preemption(
    stop: StopSignal,
    end_in_seconds: int | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PLANISH_SIGNAL_SECONDS", "300")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    if end_in_seconds is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + end_in_seconds))
    with stop.finishing(3600.0):
        send(signal.SIGUSR1)
    failure = stop.failure()
    assert failure is not None
    assert failure.reason == reason


def test_a_preemption_by_usr1_leaves_the_time_of_a_preemption(
    stop: StopSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANISH_SIGNAL_SECONDS", "300")
    monkeypatch.setenv("PLANISH_GRACE_SECONDS", "0.2")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3600))
    with stop.finishing(3600.0, cluster_bounds()):
        send(signal.SIGUSR1)
        with pytest.raises(Stopped) as caught:
            time.sleep(5)
    assert caught.value.reason is Reason.PREEMPTED


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan"])
def test_a_bound_that_is_no_time(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANISH_GRACE_SECONDS", text)
    with pytest.raises(JobFailure, match="must be a number of seconds") as caught:
        cluster_bounds()
    assert caught.value.reason is Reason.LAUNCH_FAILED


def test_one_telling_may_come_several_times(stop: StopSignal) -> None:
    """SLURM signals every process of a step, and those that started the driver hand it on."""
    with stop.finishing(3600.0):
        for _ in range(3):
            send(signal.SIGTERM)
    failure = stop.failure()
    assert failure is not None
    assert failure.reason is Reason.PREEMPTED


def test_a_service_that_was_started_anew_tells_again(
    stop: StopSignal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_backend.driver.stop.ECHO_SECONDS", 0.0)
    (tmp_path / "stop").write_text("TIMEOUT\n")
    with stop.finishing(3600.0):
        for _ in range(3):
            send(signal.SIGTERM)
        failure = stop.failure()
    assert failure is not None
    assert failure.reason is Reason.TIMEOUT


def test_a_users_cancel_is_never_an_echo(stop: StopSignal, tmp_path: Path) -> None:
    with stop.finishing(3600.0):
        send(signal.SIGTERM)
        (tmp_path / "stop").write_text("CANCELLED\n")
        with pytest.raises(Stopped):
            send(signal.SIGTERM)
