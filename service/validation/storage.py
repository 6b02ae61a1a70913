"""Whether checkpoints can be copied to where a job wants them."""

from importlib.util import find_spec

from service.spec import CheckpointSpec
from service.validation.problems import FieldProblem


def check_storage(checkpoint: CheckpointSpec) -> list[FieldProblem]:
    """Whether the library for the job's storage is installed; nobody is asked over the network."""
    if checkpoint.storage is None or find_spec("s3fs") is not None:
        return []
    problem = FieldProblem(
        field="checkpoint.storage",
        message="this installation cannot speak to S3",
        fix="install planish with the extra `s3`, or leave the field out",
    )
    return [problem]
