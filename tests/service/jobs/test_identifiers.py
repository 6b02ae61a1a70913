import re
from collections.abc import Callable

import pytest
from pydantic import TypeAdapter

from service.jobs import new_file_id, new_job_id, new_key_id
from service.spec.parts import JobReference, RowsLocation


@pytest.mark.parametrize(
    ("make", "prefix"), [(new_job_id, "job"), (new_file_id, "file"), (new_key_id, "key")]
)
def test_ids_are_random_and_safe_as_names(make: Callable[[], str], prefix: str) -> None:
    made = {make() for _ in range(200)}
    assert len(made) == 200
    assert all(re.fullmatch(f"{prefix}-[a-z0-9]{{16}}", name) for name in made)


def test_ids_fit_where_the_spec_names_them() -> None:
    TypeAdapter(RowsLocation).validate_python(new_file_id())
    TypeAdapter(JobReference).validate_python(f"job:{new_job_id()}@latest")
