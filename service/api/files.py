"""Uploads."""

import time
import unicodedata
from contextlib import ExitStack
from http import HTTPStatus

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from service.api.context import Caller, Service, ServiceContext
from service.api.paging import After, Limit, read_page
from service.api.problems import Refusal, not_found
from service.api.resources import FileResource, Listing
from service.api.views import file_resource
from service.files.isolated import check_upload
from service.files.multipart import MalformedUpload, UploadForm, read_form
from service.files.rows import MAX_LISTED
from service.files.storage import IncomingFile, UploadTooLarge, receive
from service.jobs import ApiKey, File, new_file_id
from service.store import NotFound
from service.validation.files import TRAINING_PURPOSE
from service.validation.problems import FieldProblem, InvalidRequest, quote

router = APIRouter(prefix="/v1", tags=["files"])

PURPOSES = {
    TRAINING_PURPOSE: "rows to train on, as JSONL, a JSON array or Parquet; each is checked",
    "user_data": "anything; stored as it is",
}
MAX_NAME_CHARACTERS = 255
PARQUET_SECONDS = 600.0
# NUL, line breaks and the like, and halves of surrogate pairs.
_CONTROL = frozenset({"Cc", "Cs"})

_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {
                            "type": "string",
                            "enum": list(PURPOSES),
                            "default": TRAINING_PURPOSE,
                        },
                    },
                }
            }
        },
    }
}


@router.post("/files", status_code=201, openapi_extra=_BODY)
async def upload_file(request: Request, service: Service, caller: Caller) -> FileResource:
    """Stores a file under a new id, or refuses it with the first 20 bad rows and keeps nothing."""
    limit = service.settings.max_upload_bytes
    try:
        with receive(service.settings.files_dir, limit=limit) as incoming:
            form = await read_form(
                request.headers.get("content-type", ""), request.stream(), incoming.write
            )
            file = await run_in_threadpool(_keep, service, caller, incoming, form)
    except MalformedUpload as error:
        raise InvalidRequest([FieldProblem(field="file", message=str(error))]) from None
    except UploadTooLarge as error:
        raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error), kind="too-large") from None
    except ClientDisconnect:
        raise Refusal(HTTPStatus.BAD_REQUEST, "the client went away in the middle") from None
    return file_resource(file)


def _keep(
    service: ServiceContext, caller: ApiKey, incoming: IncomingFile, form: UploadForm
) -> File:
    problems = _check_form(form)
    if problems:
        raise InvalidRequest(problems)
    purpose = form.fields.get("purpose", TRAINING_PURPOSE)
    stored = incoming.finish()
    lines = _check_rows(service, incoming) if purpose == TRAINING_PURPOSE else None
    file = File(
        id=new_file_id(),
        name=form.file_name or "",
        purpose=purpose,
        bytes=stored.bytes,
        sha256=stored.sha256,
        lines=lines,
        created_at=time.time(),
        created_by=caller.id,
    )
    with ExitStack() as undo:
        place = incoming.publish(file.id)
        undo.callback(place.unlink)
        service.store.files.add(file)
        undo.pop_all()
    return file


def _check_rows(service: ServiceContext, incoming: IncomingFile) -> int:
    report = check_upload(
        incoming.path,
        max_row_bytes=service.settings.max_line_bytes,
        timeout_seconds=PARQUET_SECONDS,
    )
    if not report.problems:
        return report.rows
    problems = list(report.problems)
    if report.bad_rows > MAX_LISTED:
        rest = FieldProblem(
            field="file", message=f"{report.bad_rows - MAX_LISTED} more rows are bad"
        )
        problems.append(rest)
    raise InvalidRequest(problems)


def _check_form(form: UploadForm) -> list[FieldProblem]:
    problems = [
        FieldProblem(
            field=name,
            message=f"unknown field {quote(name)}",
            fix="send `file` and, if it is not for training, `purpose`",
        )
        for name in form.fields
        if name != "purpose"
    ]
    purpose = form.fields.get("purpose", TRAINING_PURPOSE)
    if purpose not in PURPOSES:
        known = ", ".join(f"{name} ({what})" for name, what in PURPOSES.items())
        problems.append(
            FieldProblem(
                field="purpose", message=f"unknown purpose {quote(purpose)}", fix=f"use {known}"
            )
        )
    name = form.file_name or ""
    if len(name) > MAX_NAME_CHARACTERS:
        problems.append(
            FieldProblem(
                field="file",
                message=f"the file's name has {len(name)} characters",
                fix=f"use at most {MAX_NAME_CHARACTERS}",
            )
        )
    elif any(unicodedata.category(character) in _CONTROL for character in name):
        problems.append(
            FieldProblem(
                field="file",
                message=f"the file's name {quote(name)} holds control characters",
                fix="use another name",
            )
        )
    return problems


@router.get("/files")
def list_files(
    service: Service, _caller: Caller, limit: Limit = 20, after: After = None
) -> Listing[FileResource]:
    """Lists uploaded files, newest first."""
    files = service.store.files
    page = read_page(
        lambda cursor: files.page(limit=limit, after=cursor),
        after,
        lambda file_id: files.get(file_id).created_at,
    )
    return Listing(
        data=[file_resource(file) for file in page.items],
        has_more=page.has_more,
        next=page.cursor if page.has_more else None,
    )


@router.get("/files/{file}")
def get_file(file: str, service: Service, _caller: Caller) -> FileResource:
    """What is known about a file."""
    try:
        return file_resource(service.store.files.get(file))
    except NotFound:
        raise not_found("file", file, "/v1/files") from None
