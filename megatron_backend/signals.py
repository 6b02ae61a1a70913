"""Signals that tell a driver to end, kept from the processes that it needs until it has.

Clusters send SIGTERM to every process of a job at once: SLURM to all of a step, a process group's
leader to its group. The driver then has a grace in which it saves, and for that it needs its ranks
and Ray's processes, whose own answer to SIGTERM is to go at once. So in all of them the signals are
blocked. A blocked signal stays blocked in whatever a process forks and executes, and Ray unblocks
none; so it is enough to block them where the first of those processes are started. What ends them
is SIGKILL, or the end of the driver.

In a Ray that others have started the ranks can only see to themselves (`ignore_signals`).
"""

import ctypes
import signal
from collections.abc import Iterator
from contextlib import contextmanager

END_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_SIG_IGN = 1


def block_signals() -> None:
    """Blocks them in this thread, and so in what it forks and executes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes that are started inside this block do not get them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Has this whole process ignore them; may be called from any of its threads.

    Python lets only the main thread do that, which in an actor is not the one that runs its code.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    for number in END_SIGNALS:
        libc.signal(number, _SIG_IGN)
