"""Uploads over HTTP: case G23 (names), B11 (nothing is kept of what is refused)."""

import os
from pathlib import Path

import pytest

from service.files.storage import content_path
from tests.service.running_service import ROW, RunningService
from tests.service.spec.rows.parquet_files import write_parquet

BOUNDARY = "planish-test"


def raw_upload(service: RunningService, name: bytes, content: bytes = ROW) -> tuple[int, dict]:  # type: ignore[type-arg]
    """Sends the name's bytes as they are; HTTP libraries would escape some."""
    body = (
        b"--planish-test\r\n"
        b'Content-Disposition: form-data; name="file"; filename="' + name + b'"\r\n\r\n'
    )
    body += content + b"\r\n--planish-test--\r\n"
    answer = service.http.post(
        "/v1/files",
        content=body,
        headers={"content-type": f"multipart/form-data; boundary={BOUNDARY}"},
    )
    return answer.status_code, answer.json()


def tree(root: Path) -> set[str]:
    return {os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names}


@pytest.mark.parametrize(
    "name",
    [
        "../../x.jsonl",
        "/etc/x",
        "..\\x",
        "%2e%2e/x",
        "CON",
        "...",
        "-rf",
        "$(touch pwned)",
        "имя\u202ftab.jsonl",
        "<script>.jsonl",
    ],
)
def test_g23_a_name_is_metadata_only(service: RunningService, name: str) -> None:
    files_dir = service.settings.files_dir
    outside = tree(service.settings.data_dir.parent) - tree(files_dir)
    status, file = raw_upload(service, name.encode())
    assert status == 201, file
    assert file["filename"] == name
    assert content_path(files_dir, file["id"]).read_bytes() == ROW
    after = tree(service.settings.data_dir.parent) - tree(files_dir)
    new = {path for path in after - outside if "planish.db" not in path}
    assert new == set()


@pytest.mark.parametrize("name", [b"a\0b", b"a" * 5000, b"a\x1bb", b"\xff\xfe"])
def test_g23_nul_and_overlong_names_are_refused(service: RunningService, name: bytes) -> None:
    before = tree(service.settings.files_dir)
    status, problem = raw_upload(service, name)
    assert status == 422
    assert problem["errors"][0]["field"] == "file"
    assert tree(service.settings.files_dir) == before


def test_g23_a_link_in_the_folder_is_not_followed(service: RunningService, tmp_path: Path) -> None:
    target = tmp_path / "target"
    link = service.settings.files_dir / "file-aaaaaaaaaaaaaaaa"
    service.settings.files_dir.mkdir(exist_ok=True)
    link.symlink_to(target)
    status, file = raw_upload(service, b"file-aaaaaaaaaaaaaaaa")
    link.unlink()
    assert status == 201
    assert file["id"] != "file-aaaaaaaaaaaaaaaa"
    assert not target.exists()


def test_b11_a_refused_file_leaves_nothing(service: RunningService) -> None:
    before = tree(service.settings.files_dir)
    rows = len(service.store.files.page(limit=1000).items)
    status, problem = raw_upload(service, b"rows.jsonl", ROW + b'{"messages": "text"}\n' + ROW[:20])
    assert status == 422
    assert [e["field"] for e in problem["errors"]] == ["line 2", "line 3"]
    assert tree(service.settings.files_dir) == before
    assert len(service.store.files.page(limit=1000).items) == rows


def test_b11_30_bad_lines_list_20_and_count_the_rest(service: RunningService) -> None:
    _, problem = raw_upload(service, b"rows.jsonl", b"{}\n" * 30)
    assert len(problem["errors"]) == 21
    assert problem["errors"][-1]["message"] == "10 more rows are bad"


def test_an_uploaded_file_is_shown_alike_everywhere(service: RunningService) -> None:
    status, file = raw_upload(service, b"rows.jsonl")
    assert status == 201
    assert (file["object"], file["purpose"], file["status"]) == ("file", "fine-tune", "processed")
    assert (file["bytes"], file["lines"]) == (len(ROW), 1)
    assert service.http.get(f"/v1/files/{file['id']}").json() == file
    assert service.http.get("/v1/files", params={"limit": 1}).json()["data"] == [file]


def test_other_purposes_are_not_checked_as_rows(service: RunningService) -> None:
    answer = service.http.post(
        "/v1/files", data={"purpose": "user_data"}, files={"file": ("x.bin", b"\0\xff")}
    )
    assert answer.status_code == 201
    assert answer.json()["lines"] is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"purpose": "batch"}, "purpose"), ({"expires_after": "1"}, "expires_after")],
)
def test_unknown_fields_and_purposes_are_refused(
    service: RunningService, fields: dict[str, str], field: str
) -> None:
    answer = service.http.post("/v1/files", data=fields, files={"file": ("x", ROW)})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == field


def test_a_file_over_the_limit_is_refused_while_it_arrives(new_service) -> None:  # type: ignore[no-untyped-def]
    service = new_service(max_upload_bytes=1000)
    answer = service.http.post("/v1/files", files={"file": ("x", ROW * 20)})
    assert answer.status_code == 413
    assert tree(service.settings.files_dir) == set()


def test_an_unknown_file_is_a_404(service: RunningService) -> None:
    answer = service.http.get("/v1/files/file-zzzzzzzzzzzzzzzz")
    assert answer.status_code == 404
    assert answer.json()["type"] == "urn:planish:problem:not-found"
    assert "GET /v1/files" in answer.json()["detail"]


def test_b11_parquet_is_taken_or_refused_by_its_rows(
    service: RunningService, tmp_path: Path
) -> None:
    path = tmp_path / "rows.parquet"
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    write_parquet(path, [good] * 3)
    assert service.http.get(f"/v1/files/{service.upload(path.read_bytes())}").json()["lines"] == 3
    write_parquet(path, [good, {**good, "rejected": None}, good])
    status, problem = raw_upload(service, b"rows.parquet", path.read_bytes())
    assert status == 422
    (error,) = problem["errors"]
    assert (error["field"], error["fix"]) == (
        "row 2",
        "for chosen and rejected it lacks `rejected`",
    )
