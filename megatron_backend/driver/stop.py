"""What tells a driver to end before its job does, and what it does about it.

SIGTERM comes from whoever takes the machine back, SIGUSR1 from a scheduler some time before its
time limit (`sbatch --signal`). A service that asks for the end itself sends SIGTERM too, and has
written its reason into the attempt's `stop` file before.

A driver that trains finishes its step, saves, and ends; when `faults.grace_seconds` are over, or at
a second signal, it ends without. A user's cancel waits for nothing, nor does a driver that has not
begun to train or has done so. A cluster may kill what has not ended sooner than that, and its
launcher knows when: PLANISH_GRACE_SECONDS in the environment bounds the time.

Ray turns an exception that comes up inside one of its calls into a SystemError, and its own
handler, in place while it starts, exits. So that a signal came is also remembered here.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from algorithms.errors import JobFailure
from megatron_backend.driver.outcome import Stopped
from service.spec import Reason

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
GRACE_VARIABLE = "PLANISH_GRACE_SECONDS"


def grace_seconds(wanted: float) -> float:
    """How long a driver may take to end once it is told to.

    Args:
        wanted: by the job, `faults.grace_seconds`.

    Raises:
        JobFailure: the cluster's own bound, in the environment, is no number of seconds.
    """
    text = os.environ.get(GRACE_VARIABLE, "inf")
    try:
        bound = float(text)
        if not bound >= 0:
            raise ValueError
    except ValueError:
        raise JobFailure(
            Reason.LAUNCH_FAILED,
            f"{GRACE_VARIABLE} must be a number of seconds, and is {text!r}: mend the options of "
            "this cluster",
        ) from None
    return min(wanted, bound)


class StopSignal:
    """The signals of one driver.

    Args:
        attempt_folder: where the service's `stop` file would be.
    """

    def __init__(self, attempt_folder: Path) -> None:
        self._stop_file = attempt_folder / "stop"
        self._stopped: Stopped | None = None
        self._grace_seconds = 0.0

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
    def finishing(self, grace_seconds: float) -> Iterator[None]:
        """Inside this block whoever asks `failure` often enough is given time to end well."""
        self._grace_seconds = grace_seconds
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
        first = self._stopped is None
        if self._stopped is None:
            self._stopped = self._because(signal.Signals(number))
        if first and self._grace_seconds and self._stopped.reason is not Reason.CANCELLED:
            signal.setitimer(signal.ITIMER_REAL, self._grace_seconds)
            return
        raise self._stopped

    def _because(self, number: signal.Signals) -> Stopped:
        try:
            reason = Reason(self._stop_file.read_text(encoding="ascii").strip())
        except FileNotFoundError:
            reason = Reason.TIMEOUT if number == signal.SIGUSR1 else Reason.PREEMPTED
        return Stopped(reason, f"stopped by {number.name}")
