"""Whether the files that a job names were uploaded, and for training."""

from pathlib import Path

from service.files.storage import content_path
from service.spec import DataSpec
from service.store import NotFound, Store
from service.validation.problems import FieldProblem, quote

TRAINING_PURPOSE = "fine-tune"


def find_files(
    data: DataSpec, store: Store, root: Path
) -> tuple[dict[str, str], list[FieldProblem]]:
    """Paths of the job's files by id, and what is wrong.

    Args:
        data: the job's `data`.
        store: knows the files.
        root: where their content lies.
    """
    paths: dict[str, str] = {}
    problems: list[FieldProblem] = []
    for field, file_id in (("data.train", data.train), ("data.validation", data.validation)):
        if file_id is None:
            continue
        try:
            file = store.files.get(file_id)
        except NotFound:
            problems.append(
                FieldProblem(
                    field=field,
                    message=f"there is no file {quote(file_id)}",
                    fix="upload it with POST /v1/files, or see GET /v1/files",
                )
            )
            continue
        if file.purpose != TRAINING_PURPOSE:
            problems.append(
                FieldProblem(
                    field=field,
                    message=f"the file {file_id} was uploaded with the purpose {file.purpose}",
                    fix=f"upload it with the purpose {TRAINING_PURPOSE}, so that it is checked",
                )
            )
            continue
        paths[file_id] = str(content_path(root, file_id))
    return paths, problems
