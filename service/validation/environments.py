"""Whether a job's environments exist and take its settings."""

import difflib

from service.catalogue import Catalogue
from service.spec import EnvironmentRef
from service.validation.problems import FieldProblem, field_path, quote


def resolve_environment(
    reference: EnvironmentRef, catalogue: Catalogue, field: str
) -> tuple[EnvironmentRef | None, list[FieldProblem]]:
    """The reference with its version filled in, or None and what is wrong.

    Args:
        reference: from the job.
        catalogue: what is installed.
        field: `environment` or `evaluation.environment`.

    Raises:
        CatalogueUnavailable: the environments' process failed.
    """
    known = catalogue.environments()
    if reference.id not in known:
        problem = FieldProblem(
            field=f"{field}.id",
            message=f"unknown environment {quote(reference.id)}",
            fix=_suggestion(reference.id, list(known)),
        )
        return None, [problem]
    version, faults = catalogue.check(
        id=reference.id,
        version=reference.version,
        max_turns=reference.max_turns,
        config=reference.config,
    )
    if version is None:
        return None, [
            FieldProblem(
                field=field_path((field, *fault.loc)),
                message=fault.message,
                fix=f"GET /v1/environments shows what {reference.id} takes",
            )
            for fault in faults
        ]
    return reference.model_copy(update={"version": version}), []


def _suggestion(wanted: str, known: list[str]) -> str:
    """Lists what there is; of a long list, what looks like the wanted one."""
    if len(known) <= 12:
        return f"use one of: {', '.join(known)}"
    close = difflib.get_close_matches(wanted, known, n=5, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}? GET /v1/environments lists all"
    return "GET /v1/environments lists them"
