"""Small jobs, as the API would store them."""

from typing import Any

from service.jobs import new_job_id
from service.spec import JobContext, JobSpec, ResolvedModel


def document(name: str = "sample", **parts: Any) -> dict[str, Any]:
    """A job's document; `parts` replace or add to its top-level fields."""
    return {
        "name": name,
        "model": {"path": "models/tiny"},
        "algorithm": {"type": "sft"},
        "data": {"train": "file-0123456789abcdef"},
        **parts,
    }


def context(spec: dict[str, Any], job_id: str | None = None) -> JobContext:
    """The document, resolved."""
    return JobContext(
        job_id=job_id or new_job_id(),
        spec=JobSpec.model_validate(spec),
        dp=1,
        model=ResolvedModel(
            kind="huggingface", config={}, tokenizer="models/tiny", weights="models/tiny"
        ),
    )
