"""What tells a driver to end before its job does, and what it does about it.

SIGTERM comes from whoever takes the machine back, SIGUSR1 from a scheduler some time before its
time limit (`sbatch --signal`). A service that asks for the end itself sends SIGTERM too, and has
written its reason into the attempt's `stop` file before.

A cluster of SLURM may send SIGUSR1 at a preemption too (`PreemptParameters=send_user_signal`). So
where the time limit is known, and far away, the signal is taken for that.

A driver that trains finishes its step, saves, and ends; when `faults.grace_seconds` are over, or at
a second signal, it ends without. A user's cancel waits for nothing, nor does a driver that has not
begun to train or has done so. Once training and the export have ended, well or not, a signal does
nothing: the end is known, and needs only to be written down.

A cluster may kill what has not ended sooner than that, and its launcher knows when. The variables
of `_BOUNDS` in the environment bound the time after each signal.

One telling may arrive several times: SLURM signals every process of a step, and those that started
the driver hand on what they got. So for `ECHO_SECONDS` the same signals are the same telling. A
service tells again whenever it was started anew, and kills where its patience ends; so where it has
written a reason, a later signal says nothing new.

Ray turns an exception that comes up inside one of its calls into a SystemError, and its own
handler, in place while it starts, exits. So that a signal came is also remembered here.
"""

import math
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from algorithms.errors import JobFailure
from megatron_backend.driver.outcome import Stopped
from service.spec import Reason, driver_variables

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
ECHO_SECONDS = 10.0
_EARLY_SECONDS = 120.0
"""SLURM may be up to 60 s early with the signal before its limit; its clock may be another."""
_BOUNDS = {
    signal.SIGTERM: driver_variables.GRACE_SECONDS,
    signal.SIGUSR1: driver_variables.SIGNAL_SECONDS,
}


def cluster_bounds() -> Mapping[signal.Signals, float]:
    """Seconds that the cluster leaves a driver after each signal; without an entry, no bound.

    Raises:
        JobFailure: what the environment says is no number of seconds.
    """
    return {
        number: _seconds(name, os.environ[name])
        for number, name in _BOUNDS.items()
        if name in os.environ
    }


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if seconds >= 0:
        return seconds
    raise JobFailure(
        Reason.LAUNCH_FAILED,
        f"{name} must be a number of seconds, and is {text!r}: mend the options of this cluster",
    )


class StopSignal:
    """The signals of one driver.

    Args:
        attempt_folder: where the service's `stop` file would be.
    """

    def __init__(self, attempt_folder: Path) -> None:
        self._stop_file = attempt_folder / "stop"
        self._stopped: Stopped | None = None
        self._told_at = 0.0
        self._grace_seconds = 0.0
        self._bounds: Mapping[signal.Signals, float] = {}

    def install(self) -> None:
        """Takes the signals over."""
        for number in _SIGNALS:
            signal.signal(number, self._receive)

    def ignore(self) -> None:
        """From now on no signal does anything."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def finishing(
        self, grace_seconds: float, bounds: Mapping[signal.Signals, float] | None = None
    ) -> Iterator[None]:
        """Inside this block whoever asks `failure` often enough is given time to end well.

        Args:
            grace_seconds: how much time.
            bounds: see `cluster_bounds`.
        """
        self._grace_seconds, self._bounds = grace_seconds, bounds or {}
        try:
            yield
        finally:
            self._grace_seconds = 0.0

    def failure(self) -> JobFailure | None:
        """Why to end now, if at all."""
        if self._stopped is None:
            return None
        return JobFailure(
            self._stopped.reason, f"{self._stopped}; the step that was under way is done and saved"
        )

    def cause(self, error: BaseException) -> BaseException:
        """What an error comes from that has ended the driver."""
        if isinstance(error, JobFailure) and error.reason is Reason.ENVIRONMENT_ERRORS:
            return self._stopped or error  # whoever takes a machine back ends its processes too
        if isinstance(error, JobFailure | Stopped):
            return error
        if self._stopped is None and isinstance(error, SystemExit):
            return self._because(signal.SIGTERM)
        return self._stopped or error

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self._stopped is None:
            self._stopped, self._told_at = self._because(signal.Signals(number)), time.monotonic()
            preempted = self._stopped.reason is Reason.PREEMPTED  # by whichever signal
            bound = self._bounds.get(
                signal.SIGTERM if preempted else signal.Signals(number), math.inf
            )
            grace = min(self._grace_seconds, bound)
            if grace and self._stopped.reason is not Reason.CANCELLED:
                signal.setitimer(signal.ITIMER_REAL, grace)
                return
        elif self._is_echo(signal.Signals(number)):
            return
        raise self._stopped

    def _is_echo(self, number: signal.Signals) -> bool:
        """Whether a later signal says nothing new."""
        if number == signal.SIGALRM or self._because(number).reason is Reason.CANCELLED:
            return False
        return self._stop_file.exists() or time.monotonic() < self._told_at + ECHO_SECONDS

    def _because(self, number: signal.Signals) -> Stopped:
        try:
            reason = Reason(self._stop_file.read_text(encoding="ascii").strip())
        except FileNotFoundError:
            at_limit = number == signal.SIGUSR1 and not _limit_is_far()
            reason = Reason.TIMEOUT if at_limit else Reason.PREEMPTED
        return Stopped(reason, f"stopped by {number.name}")


def _limit_is_far() -> bool:
    """Whether SLURM's time limit is known, and too far away to be what a signal is about."""
    try:
        end = float(os.environ["SLURM_JOB_END_TIME"])  # seconds since the epoch; SLURM 23.02 on
        ahead = float(os.environ[driver_variables.SIGNAL_SECONDS])
    except (KeyError, ValueError):
        return False
    return end - time.time() > ahead + _EARLY_SECONDS
