"""Folders that a user names: only what really lies under one of the operator's model roots."""

from collections.abc import Sequence
from pathlib import Path

from service.validation.problems import FieldProblem, quote


def find_folder(
    name: str, roots: Sequence[Path], field: str
) -> tuple[Path | None, FieldProblem | None]:
    """Finds a folder by an absolute path, or by a path relative to one of the roots.

    Symlinks and `..` are resolved first, and what counts is where that ends. A path outside is
    refused in the same words whether something is there or not.

    Args:
        name: as the user gave it.
        roots: folders with their own symlinks resolved.
        field: what to call it in a problem.

    Returns:
        The real path, or None and what is wrong.
    """
    allowed = ", ".join(map(str, roots))
    if "\0" in name:
        return None, FieldProblem(
            field=field, message="the path holds a NUL character", fix="remove it"
        )
    missing = False
    for candidate in [Path(name)] if Path(name).is_absolute() else [r / name for r in roots]:
        try:
            real = candidate.resolve()
            inside = any(real.is_relative_to(root) for root in roots)
            if inside and real.is_dir():
                return real, None
        except (OSError, RuntimeError):  # a loop of symlinks, a name that is too long
            inside = True
        missing = missing or inside
    if missing:
        message = f"there is no folder {quote(name)}"
        fix = f"put the model there, or name another one under {allowed}"
    else:
        message = f"{quote(name)} is not under one of the service's model roots"
        fix = f"use a folder under {allowed}, or ask the operator for another --model-root"
    return None, FieldProblem(field=field, message=message, fix=fix)
