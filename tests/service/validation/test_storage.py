"""Storage of checkpoints, at submit."""

import subprocess
import sys

from service.spec import CheckpointSpec
from service.validation.storage import check_storage

STORAGE = CheckpointSpec(storage="s3://bucket/prefix")


def test_with_the_library_or_without_a_storage_nothing_is_wrong() -> None:
    assert check_storage(STORAGE) == check_storage(CheckpointSpec()) == []


def test_without_the_library_the_field_is_named() -> None:
    script = (
        "import sys; sys.modules['s3fs'] = None; import importlib.util\n"
        "from service.spec import CheckpointSpec\n"
        "from service.validation.storage import check_storage\n"
        "spec = CheckpointSpec(storage='s3://bucket/prefix')\n"
        "(problem,) = check_storage(spec)\n"
        "print(problem.field, '|', problem.fix)\n"
    )
    # An interpreter of its own in which the library cannot be found.
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert run.stdout == (
        "checkpoint.storage | install planish with the extra `s3`, or leave the field out\n"
    ), run.stderr
