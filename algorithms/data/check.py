"""What a file of rows is like as training data, without training on it."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from algorithms.data.chat import ChatFormat
from algorithms.data.examples import Example, Item, sequences_of
from algorithms.data.tokenized import Rules, tokenized_rows
from service.spec.algorithm import RowKind
from service.spec.parts import Strings, TooLong
from service.spec.rows import RawRow, RowFault, RowFile, check_format, format_of

MAX_LISTED = 20
BUCKETS = 12
PROGRESS_SECONDS = 0.2

type Progress = Callable[[int, int], None]
"""Takes rows and bytes that were read so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a file is checked for.

    Attributes:
        kind: rows that the algorithm takes; None takes the kind of the first row.
        chat: makes tokens; None checks rows only.
        max_length: longest sequence in tokens; None has no bound.
        too_long: what happens to a longer row.
        strings: what prompts and answers that are strings become.
    """

    kind: RowKind | None = None
    chat: ChatFormat | None = None
    max_length: int | None = None
    too_long: TooLong = "refuse"
    strings: Strings = "chat"


@dataclass(slots=True)
class Problem:
    """A row that was rejected."""

    place: str
    message: str
    fix: str | None


@dataclass(slots=True)
class Bucket:
    """Rows of `first` to `last` tokens."""

    first: int
    last: int
    rows: int


@dataclass(slots=True)
class Lengths:
    """Of each row that is kept, before the length rule; of a pair that of the longer answer."""

    shortest: int
    median: int
    percentile_95: int
    longest: int
    histogram: list[Bucket]


@dataclass(slots=True)
class Piece:
    """Text of tokens that are all trained, or all not."""

    text: str
    trained: bool


@dataclass(slots=True)
class Report:
    """What a check found; it becomes JSON as it is."""

    kind: RowKind | None
    """What the rows are taken for."""
    rows: int = 0
    accepted: int = 0
    dropped: int = 0
    """By the length rule."""
    truncated: int = 0
    """By the length rule; they are accepted, too."""
    rejected: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    """Rows by `kind: format`, rejected ones as well where their format can be told."""
    problems: list[Problem] = field(default_factory=list)
    """The first 20."""
    tokens: int | None = None
    trained_tokens: int | None = None
    lengths: Lengths | None = None
    sample_place: str | None = None
    sample: list[list[Piece]] = field(default_factory=list)
    """The first row that is accepted, decoded: its sequence, or the two of a pair."""


def check(file: RowFile, wanted: Wanted, progress: Progress) -> Report:
    """Reads a whole file.

    Raises:
        FileFault: it holds no rows.
        OSError: it cannot be read.
    """
    report = Report(kind=wanted.kind)
    formats: Counter[str] = Counter()
    rows = _watched(file, formats, report, progress)
    if wanted.chat is None:
        _check_rows(rows, report)
    else:
        _check_tokens(rows, wanted, wanted.chat, report)
    report.formats = dict(formats.most_common())
    return report


def _watched(
    file: RowFile, formats: Counter[str], report: Report, progress: Progress
) -> Iterator[RawRow]:
    """The file's rows, counted as they pass. The first that has a format decides the kind."""
    last = 0.0
    for row in file:
        report.rows += 1
        if not isinstance(row.fields, RowFault):
            try:
                found = format_of(row.fields)
            except RowFault:
                pass  # it is rejected where it is parsed
            else:
                formats[f"{found.kind}: {found.name}"] += 1
                if report.kind is None and found.kind != "prompt":
                    report.kind = found.kind
        if time.monotonic() - last > PROGRESS_SECONDS:
            last = time.monotonic()
            progress(report.rows, file.bytes_read)
        yield row
    progress(report.rows, file.bytes_read)


def _check_rows(rows: Iterable[RawRow], report: Report) -> None:
    for row in rows:
        try:
            if isinstance(row.fields, RowFault):
                raise row.fields
            found = format_of(row.fields)
            if report.kind is not None:
                check_format(found, report.kind)
            found.parse(row.fields)
        except RowFault as fault:
            _reject(report, row.place, fault)
        else:
            report.accepted += 1


def _check_tokens(rows: Iterator[RawRow], wanted: Wanted, chat: ChatFormat, report: Report) -> None:
    rows = _from_first_kind(rows, report)
    rules = Rules(
        kind=report.kind or "conversation",
        max_length=wanted.max_length or sys.maxsize,
        too_long=wanted.too_long,
        strings=wanted.strings,
    )
    lengths: Counter[int] = Counter()
    report.tokens = report.trained_tokens = 0
    for row in tokenized_rows(rows, chat, rules):
        if row.length:
            lengths[row.length] += 1
        if isinstance(row.result, RowFault):
            _reject(report, row.place, row.result)
        elif row.result is None:
            report.dropped += 1
        else:
            report.accepted += 1
            report.truncated += row.truncated
            _count(report, row.result)
            if report.sample_place is None:
                report.sample_place = row.place
                report.sample = [decode(chat, one) for one in sequences_of(row.result)]
    report.lengths = describe(lengths) if lengths else None


def _from_first_kind(rows: Iterator[RawRow], report: Report) -> Iterator[RawRow]:
    """The same rows, read on until the kind is known."""
    before = []
    for row in rows:
        before.append(row)
        if report.kind is not None:
            break

    def again() -> Iterator[RawRow]:
        yield from before
        yield from rows

    return again()


def _reject(report: Report, place: str, fault: RowFault) -> None:
    report.rejected += 1
    if len(report.problems) < MAX_LISTED:
        report.problems.append(Problem(place, fault.message, fault.fix))


def _count(report: Report, item: Item) -> None:
    assert report.tokens is not None
    assert report.trained_tokens is not None
    for example in sequences_of(item):
        report.tokens += len(example.tokens)
        report.trained_tokens += int(example.trained[1:].sum())


def decode(chat: ChatFormat, example: Example) -> list[Piece]:
    """A sequence as text, cut where training begins and ends."""
    pairs = zip(example.tokens.tolist(), example.trained.tolist(), strict=True)
    return [
        Piece(text=chat.text([token for token, _ in run]), trained=bool(trained))
        for trained, run in groupby(pairs, key=lambda pair: pair[1])
    ]


def describe(lengths: Counter[int]) -> Lengths:
    """Order statistics and a histogram of equal steps; `lengths` counts rows by length."""
    ordered = sorted(lengths)
    longest = ordered[-1]
    step = -(-longest // BUCKETS)
    buckets = [Bucket(first, first + step - 1, 0) for first in range(1, longest + 1, step)]
    for length, rows in lengths.items():
        buckets[(length - 1) // step].rows += rows
    return Lengths(
        shortest=ordered[0],
        median=_quantile(lengths, ordered, 0.5),
        percentile_95=_quantile(lengths, ordered, 0.95),
        longest=longest,
        histogram=buckets,
    )


def _quantile(lengths: Counter[int], ordered: Sequence[int], share: float) -> int:
    """The least length that at least `share` of the rows do not exceed."""
    needed, seen = share * lengths.total(), 0
    for length in ordered:
        seen += lengths[length]
        if seen >= needed:
            return length
    return ordered[-1]
