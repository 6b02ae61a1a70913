"""Rows in S3 are read as they come, like those of a path."""

import errno
import json
from typing import Any

import pytest

from service.spec.rows import FileFault, RowFile
from service.spec.rows.location import as_os_error

ROWS = [
    {"messages": [{"role": "user", "content": f"{n} \u2028 {'x' * 50_000}"}]} for n in range(200)
]


def _lines() -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


@pytest.mark.parametrize("form", ["lines", "array"])
def test_rows_of_s3_are_those_of_a_path(bucket: Any, form: str) -> None:
    """10 MB: more than is fetched at once."""
    body = _lines() if form == "lines" else json.dumps(ROWS).encode()
    bucket.put_object(Key="folder/rows", Body=body)
    file = RowFile("s3://planish-tests/folder/rows")
    assert file.size() == len(body)
    found = []
    for row in file:
        found.append(row.fields)
        if len(found) == 1:
            assert file.bytes_read < len(body)
    assert found == ROWS


@pytest.mark.parametrize("name", ["planish-tests/none", "no-such-bucket/rows"])
def test_what_is_not_there_is_an_error_of_the_file(bucket: Any, name: str) -> None:  # noqa: ARG001
    with pytest.raises(FileNotFoundError):
        list(RowFile(f"s3://{name}"))


def test_a_store_that_does_not_answer_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO is what a job's attempt counts as the infrastructure's fault, not the user's."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(OSError, match=r"cannot be read|127\.0\.0\.1") as caught:
        list(RowFile("s3://planish-tests/rows"))
    assert caught.value.errno == errno.EIO


def test_missing_credentials_are_the_user_s_to_give() -> None:
    from botocore.exceptions import NoCredentialsError

    error = as_os_error(NoCredentialsError(), "s3://bucket/rows")
    assert isinstance(error, PermissionError)
    assert "s3://bucket/rows cannot be read: Unable to locate credentials" in str(error)


def test_without_s3fs_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.spec.rows.location.find_spec", lambda _: None)
    with pytest.raises(FileFault, match="install planish with the extra `s3`"):
        list(RowFile("s3://planish-tests/rows"))
