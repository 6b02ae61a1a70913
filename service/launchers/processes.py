"""Processes of this machine, named so that no other can be taken for them.

A pid comes back after a while. A pid with the process's start time (in clock ticks since boot) and
the boot's id does not. Signals go through a pidfd that is opened first and checked after, so they
cannot reach a newcomer either.

An attempt's processes are found by the two variables that its driver was started with, which all
its children inherit (Ray's daemons too, which leave the process group), and by descent from those.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

JOB_VARIABLE = "PLANISH_JOB_ID"
ATTEMPT_VARIABLE = "PLANISH_ATTEMPT"

_PROC = Path("/proc")
_DEAD_STATES = "ZX"


@dataclass(frozen=True, slots=True)
class Process:
    """One process, for all time."""

    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    parent: int
    group: int
    start_ticks: int


@cache
def boot_id() -> str:
    """The id of this boot of the machine."""
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def is_alive(process: Process) -> bool:
    """Whether the process still runs; a zombie does not."""
    stat = _stat(process.pid)
    return (
        process.boot_id == boot_id()
        and stat is not None
        and stat.start_ticks == process.start_ticks
        and stat.state not in _DEAD_STATES
    )


def send(process: Process, number: signal.Signals) -> None:
    """Signals the process; does nothing where it has ended."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if is_alive(process):
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)


def group_of(leader: Process) -> list[Process]:
    """The processes of the group that a live `leader` leads; empty where it has ended.

    Without its leader a group's number says nothing: it may be another's by now.
    """
    stats = dict(_all_stats())
    if not is_alive(leader):
        return []
    return [_process(pid, stat) for pid, stat in stats.items() if stat.group == leader.pid]


def marked(job_id: str, attempt: int) -> list[Process]:
    """The living processes that carry the attempt's marks, and all that descend from them."""
    marks = {f"{JOB_VARIABLE}={job_id}".encode(), f"{ATTEMPT_VARIABLE}={attempt}".encode()}
    stats = dict(_all_stats())
    found = {pid for pid in stats if marks <= _environment(pid)}
    return [_process(pid, stats[pid]) for pid in _with_descendants(found, stats)]


def _with_descendants(pids: set[int], stats: dict[int, _Stat]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    found: set[int] = set()
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(children.get(pid, ()))
    return found


def _process(pid: int, stat: _Stat) -> Process:
    return Process(pid, stat.start_ticks, boot_id())


def _all_stats() -> Iterator[tuple[int, _Stat]]:
    for entry in os.listdir(_PROC):
        if entry.isdecimal():
            stat = _stat(int(entry))
            if stat is not None and stat.state not in _DEAD_STATES:
                yield int(entry), stat


def _stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in brackets, may hold blanks and brackets itself; see proc_pid_stat(5).
    fields = text.rpartition(")")[2].split()
    return _Stat(
        state=fields[0], parent=int(fields[1]), group=int(fields[2]), start_ticks=int(fields[19])
    )


def _environment(pid: int) -> set[bytes]:
    try:
        return set((_PROC / str(pid) / "environ").read_bytes().split(b"\0"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()  # gone, or another user's
