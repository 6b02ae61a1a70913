"""Reads a multipart upload from the network straight into its place on disk.

Starlette's own form parser keeps a file in a temporary one first, outside the data folder, so an
upload would be written twice, and a small /tmp would be the limit. Here the parser's callbacks
write the bytes of the part `file` as they come. The parser itself is python-multipart's.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

MAX_FIELD_BYTES = 4096
MAX_PARTS = 16
MAX_HEADER_BYTES = 16 * 1024


class MalformedUpload(Exception):
    """The body is not the multipart form that an upload is."""


@dataclass(slots=True)
class UploadForm:
    """The form without the content of the file."""

    fields: dict[str, str] = field(default_factory=dict)
    file_name: str | None = None
    """The name that came with the part `file`, as the user wrote it; null before it came."""


@dataclass(slots=True)
class _Part:
    headers: dict[str, bytes] = field(default_factory=dict)
    header_name: bytes = b""
    header_value: bytes = b""
    name: str = ""
    is_file: bool = False
    value: bytes = b""


class _FormReader:
    """Callbacks of the parser."""

    def __init__(self, sink: Callable[[bytes], None]) -> None:
        self.form = UploadForm()
        self.ended = False
        self._sink = sink
        self._part = _Part()
        self._parts = 0

    def on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise MalformedUpload(f"the form has more than {MAX_PARTS} parts")
        self._part = _Part()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._part.header_name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.header_value += data[start:end]

    def on_header_end(self) -> None:
        part = self._part
        part.headers[part.header_name.decode("latin-1").lower()] = part.header_value
        part.header_name = part.header_value = b""

    def on_headers_finished(self) -> None:
        part = self._part
        disposition, options = parse_options_header(part.headers.get("content-disposition"))
        if disposition != b"form-data" or b"name" not in options:
            raise MalformedUpload("a part has no `Content-Disposition: form-data; name=...`")
        part.name = _text(options[b"name"], "the name of a part")
        part.is_file = b"filename" in options
        if part.is_file:
            if part.name != "file":
                raise MalformedUpload(f"the file is in the part {part.name!r}; call it `file`")
            if self.form.file_name is not None:
                raise MalformedUpload("the form has two files; send one a request")
            self.form.file_name = _text(options[b"filename"], "the file's name")

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        if part.is_file:
            self._sink(data[start:end])
            return
        part.value += data[start:end]
        if len(part.value) > MAX_FIELD_BYTES:
            raise MalformedUpload(f"the field {part.name!r} is longer than {MAX_FIELD_BYTES} bytes")

    def on_part_end(self) -> None:
        part = self._part
        if part.is_file:
            return
        if part.name in self.form.fields:
            raise MalformedUpload(f"the field {part.name!r} is there twice")
        self.form.fields[part.name] = _text(part.value, f"the field {part.name!r}")

    def on_end(self) -> None:
        self.ended = True


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise MalformedUpload(f"{what} is not UTF-8") from None


async def read_form(
    content_type: str, body: AsyncIterator[bytes], sink: Callable[[bytes], None]
) -> UploadForm:
    """Reads a form with one file.

    Args:
        content_type: the request's header, with the boundary.
        body: the request's body in pieces of any size.
        sink: takes the file's bytes in order; what it raises ends the reading.

    Raises:
        MalformedUpload: it is no such form, or it ends in the middle.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise MalformedUpload(
            "send the file as multipart/form-data: `curl -F purpose=fine-tune -F file=@data.jsonl`"
        )
    reader = _FormReader(sink)
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": reader.on_part_begin,
                "on_part_data": reader.on_part_data,
                "on_part_end": reader.on_part_end,
                "on_header_field": reader.on_header_field,
                "on_header_value": reader.on_header_value,
                "on_header_end": reader.on_header_end,
                "on_headers_finished": reader.on_headers_finished,
                "on_end": reader.on_end,
            },
            max_header_size=MAX_HEADER_BYTES,
        )
        async for piece in body:
            if piece:
                parser.write(piece)
        parser.finalize()
    except FormParserError as error:
        raise MalformedUpload(f"the form cannot be read: {error}") from None
    if not reader.ended:
        raise MalformedUpload("the form ends before its last boundary: the upload was cut off")
    if reader.form.file_name is None:
        raise MalformedUpload("the form has no part `file` with a file name")
    return reader.form
