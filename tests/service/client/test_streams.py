"""Server-sent events as the client reads them."""

import json

import pytest

from service.api.streams import message, preamble
from service.client.streams import Message, read_messages


def split(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_what_the_server_writes_is_read_back_whatever_the_pieces(size: int) -> None:
    texts = ["plain", "two\nlines\r\n", "\u2028\u2029\u0085", "😀é", ": colon", ""]
    stream = preamble() + b": keep-alive\n\n"
    for number, text in enumerate(texts):
        stream += message({"text": text}, id=str(number))
    stream += message({"state": "SUCCEEDED"}, event="end")
    found = list(read_messages(split(stream, size)))
    assert found[:-1] == [
        Message("message", str(number), {"text": text}) for number, text in enumerate(texts)
    ]
    assert found[-1] == Message("end", None, {"state": "SUCCEEDED"})


def test_a_message_that_was_cut_off_is_left_out() -> None:
    whole = message({"n": 1}, id="1")
    assert list(read_messages([whole, whole[:-1]])) == [Message("message", "1", {"n": 1})]


def test_other_servers_spellings_are_read() -> None:
    stream = b'event:x\r\ndata:{"a":\r\ndata: 1}\r\nretry: 5\r\nunknown: y\r\n\r\n'
    assert list(read_messages([stream])) == [Message("x", None, json.loads('{"a": 1}'))]
