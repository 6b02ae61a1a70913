"""What a benchmark is: two programs that do the same work, and what their times are compared as."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

type Result = Mapping[str, Any]
"""What a side wrote: `seconds` by name, and whatever proves that it did the work."""


class Unequal(AssertionError):
    """The two sides did not do the same work, so their times mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two programs, run in a process of its own each time.

    Attributes:
        module: started with `python -m`; it gets the case's folder and writes result.json there.
        python: `planish` runs in this environment, `peers` in the one of tests/bench/peers.txt.
        options: handed to the module, as JSON.
        threads: of each of its processes.
    """

    module: str
    python: Literal["planish", "peers"]
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the report.

    Attributes:
        name: after the benchmark's id.
        peer: what ours is compared with.
        floor: the least median ratio.
        target: the ratio aimed at.
        ours, theirs: names in the sides' `seconds`.
        limit: names the seconds that nothing on this machine can be faster than, in our result.
        limit_ratio: or the ratio that nothing can be above, from our result.
        floor_is_share: the floor is of `limit_ratio`, not of the ratio.
    """

    name: str
    peer: str
    floor: float
    target: float
    ours: str
    theirs: str
    limit: str | None = None
    limit_ratio: str | None = None
    floor_is_share: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A comparison.

    Attributes:
        id: of the benchmark, such as B4; several may share one.
        case: its name, and its folder's.
        about: one line for the report.
        prepare: fills an empty folder with weights and data for both sides.
        ours, peer: the two sides.
        check: raises `Unequal` where the results show different work.
        rows: what is reported.
    """

    id: str
    case: str
    about: str
    prepare: Callable[[Path], None]
    ours: Side
    peer: Side
    check: Callable[[Result, Result], None]
    rows: tuple[Row, ...]


def require_close(name: str, ours: list[float], peer: list[float], *, relative: float) -> None:
    """Compares two lists of numbers.

    Raises:
        Unequal: they differ in length, or in a number by more than `relative`.
    """
    if len(ours) != len(peer):
        raise Unequal(f"{name}: {len(ours)} numbers of ours, {len(peer)} of the peer's")
    for index, (own, theirs) in enumerate(zip(ours, peer, strict=True)):
        if not abs(own - theirs) <= relative * abs(theirs):
            raise Unequal(f"{name}[{index}]: ours is {own}, the peer's {theirs}")


def require_same(name: str, ours: object, peer: object) -> None:
    """Compares two values that must be the same.

    Raises:
        Unequal: they are not.
    """
    if ours != peer:
        raise Unequal(f"{name} differs: ours is {str(ours)[:200]}, the peer's {str(peer)[:200]}")
