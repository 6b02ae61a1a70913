"""Whether the rows that a job names are there, and of the kind that its algorithm trains on."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from service.files.isolated import check_first_row
from service.files.storage import FILE_ID, content_path
from service.spec import DataSpec
from service.spec.algorithm import RowKind
from service.spec.rows import FileFault, RowFault
from service.store import NotFound, Store
from service.validation.problems import FieldProblem, quote

TRAINING_PURPOSE = "fine-tune"
PARQUET_SECONDS = 60.0


def find_files(
    data: DataSpec, rows: RowKind, *, store: Store, root: Path, data_roots: Sequence[Path]
) -> tuple[dict[str, str], list[FieldProblem]]:
    """Paths or URLs of the job's files by the names it gives them, and what is wrong.

    Nobody is asked over the network: what is in S3, the job itself finds out before its first step.

    Args:
        data: the job's `data`.
        rows: what the algorithm trains on.
        store: knows the uploaded files.
        root: where their content lies.
        data_roots: folders that other files may lie in, symlinks resolved.
    """
    paths: dict[str, str] = {}
    problems: list[FieldProblem] = []
    for field, name in (("data.train", data.train), ("data.validation", data.validation)):
        if name is None:
            continue
        if FILE_ID.fullmatch(name):
            path, problem = _uploaded(name, store, root)
        elif name.startswith("s3://"):
            path, problem = None, _check_s3()
            if problem is None:
                paths[name] = name
        else:
            path, problem = _under_roots(name, data_roots)
        if path is not None:
            paths[name] = str(path)
            problem = _check_rows(path, rows)
        if problem is not None:
            problems.append(problem.model_copy(update={"field": field}))
    return paths, problems


def _uploaded(file_id: str, store: Store, root: Path) -> tuple[Path | None, FieldProblem | None]:
    try:
        file = store.files.get(file_id)
    except NotFound:
        return None, _problem(
            f"there is no file {quote(file_id)}",
            "upload it with POST /v1/files, or see GET /v1/files",
        )
    if file.purpose != TRAINING_PURPOSE:
        return None, _problem(
            f"the file {file_id} was uploaded with the purpose {file.purpose}",
            f"upload it with the purpose {TRAINING_PURPOSE}, so that it is checked",
        )
    return content_path(root, file_id), None


def _under_roots(name: str, data_roots: Sequence[Path]) -> tuple[Path | None, FieldProblem | None]:
    """A file at a path; one outside is refused in the same words whether it is there or not."""
    try:
        found = Path(name).resolve()
        if any(found.is_relative_to(root) for root in data_roots) and found.is_file():
            return found, None
    except (OSError, RuntimeError):  # a loop of symlinks, a name that is too long
        pass
    allowed = ", ".join(map(str, data_roots))
    return None, _problem(
        f"there is no file {quote(name)} under one of the service's data roots",
        f"put it under {allowed}, or upload it with POST /v1/files",
    )


def _check_s3() -> FieldProblem | None:
    if find_spec("s3fs") is not None:
        return None
    return _problem(
        "this installation cannot speak to S3", "install planish with the extra `s3`, or upload it"
    )


def _check_rows(path: Path, rows: RowKind) -> FieldProblem | None:
    """Whether the first row is of the right kind: those of an upload are all of one."""
    try:
        check_first_row(path, rows, timeout_seconds=PARQUET_SECONDS)
    except RowFault as fault:
        return _problem(f"its first row: {fault.message}", fault.fix)
    except (FileFault, OSError) as error:
        return _problem(str(error), "upload it again, or name another one")
    return None


def _problem(message: str, fix: str | None) -> FieldProblem:
    return FieldProblem(field="", message=message, fix=fix)
