"""Checks an uploaded file of rows, each row, and says what is in it."""

from dataclasses import dataclass, field
from pathlib import Path

from service.spec.rows import FileFault, Format, RawRow, RowFault, RowFile, format_of
from service.validation.problems import FieldProblem

MAX_LISTED = 20


@dataclass(slots=True)
class Report:
    """What a check of a file found."""

    rows: int = 0
    bad_rows: int = 0
    problems: list[FieldProblem] = field(default_factory=list)
    """The first 20 of them."""

    def add(self, place: str, message: str, fix: str | None = None) -> None:
        """Notes a bad row by its place, such as `line 7`."""
        self.bad_rows += 1
        if len(self.problems) < MAX_LISTED:
            self.problems.append(FieldProblem(field=place, message=message, fix=fix))


def check_rows(path: Path, *, max_row_bytes: int) -> Report:
    """Checks that each row is of a known format, and that all are of one kind.

    Args:
        path: the file.
        max_row_bytes: longest row of JSON that is accepted, in bytes without its line end.
    """
    report = Report()
    first: tuple[str, Format] | None = None
    try:
        for row in RowFile(path, max_row_bytes=max_row_bytes):
            try:
                found = _check_row(row)
                first = first or (row.place, found)
                _check_same_kind(found, *first)
            except RowFault as fault:
                report.add(row.place, fault.message, fault.fix)
            else:
                report.rows += 1
    except (FileFault, OSError) as error:
        report.problems.append(FieldProblem(field="file", message=str(error)))
    return report


def first_format(path: Path) -> Format:
    """The format of the first row.

    Raises:
        RowFault: it is none that is known.
        FileFault: the file holds no rows.
        OSError: it cannot be read.
    """
    row = next(iter(RowFile(path)))
    if isinstance(row.fields, RowFault):
        raise row.fields
    return format_of(row.fields)


def _check_row(row: RawRow) -> Format:
    if isinstance(row.fields, RowFault):
        raise row.fields
    found = format_of(row.fields)
    found.parse(row.fields)
    return found


def _check_same_kind(found: Format, place: str, first: Format) -> None:
    if found.kind != first.kind:
        raise RowFault(
            f"the row is of another kind ({found.name}: {found.kind}) than {place} "
            f"({first.name}: {first.kind})",
            "put the two kinds into two files",
        )
