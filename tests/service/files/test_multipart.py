"""Forms in pieces of any size, and forms that are none."""

from collections.abc import AsyncIterator

import pytest

from service.files.multipart import MAX_PARTS, MalformedUpload, UploadForm, read_form

TYPE = "multipart/form-data; boundary=XX"


def part(headers: str, content: str) -> str:
    return f"--XX\r\n{headers}\r\n\r\n{content}\r\n"


FILE = part('Content-Disposition: form-data; name="file"; filename="a.jsonl"', "one\r\n--X two")
PURPOSE = part('Content-Disposition: form-data; name="purpose"', "fine-tune")
END = "--XX--\r\n"


async def read(body: str | bytes, size: int = 7, kind: str = TYPE) -> tuple[UploadForm, bytes]:
    raw = body.encode() if isinstance(body, str) else body
    written = bytearray()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(raw), size):
            yield raw[start : start + size]

    form = await read_form(kind, pieces(), written.extend)
    return form, bytes(written)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("body", [FILE + PURPOSE + END, PURPOSE + FILE + END])
async def test_any_order_and_any_pieces(body: str, size: int) -> None:
    form, content = await read(body, size)
    assert form.file_name == "a.jsonl"
    assert form.fields == {"purpose": "fine-tune"}
    assert content == b"one\r\n--X two"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (FILE, "cut off"),
        (FILE[:-20], "cut off"),
        (PURPOSE + END, "no part `file`"),
        (FILE + FILE + END, "two files"),
        (PURPOSE + PURPOSE + FILE + END, "there twice"),
        (FILE.replace('"file"', '"data"') + END, "call it `file`"),
        (part("Content-Type: text/plain", "x") + END, "Content-Disposition"),
        (PURPOSE.replace("fine-tune", "x" * 5000) + FILE + END, "longer than"),
        ("".join(PURPOSE.replace("purpose", f"p{n}") for n in range(MAX_PARTS + 1)), "more than"),
        ("nonsense", "cannot be read"),
        ("", "cut off"),
    ],
)
async def test_malformed_forms_say_why(body: str, says: str) -> None:
    with pytest.raises(MalformedUpload, match=says):
        await read(body)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["application/json", "", "multipart/form-data"])
async def test_another_content_type_is_answered_with_the_right_command(kind: str) -> None:
    with pytest.raises(MalformedUpload, match="curl"):
        await read("{}", kind=kind)


@pytest.mark.asyncio
async def test_a_name_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(MalformedUpload, match="not UTF-8"):
        await read(FILE.replace("a.jsonl", "\u00ff").encode("latin-1") + END.encode())
