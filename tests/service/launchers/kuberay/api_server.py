"""A small HTTP server that plays the API server, as far as the launcher asks it anything."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAMESPACE = "ns"


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    body: Any


@dataclass
class Answer:
    """A status with a body, or the events of a stream, which then ends."""

    body: Any = field(default_factory=dict)
    status: int = 200
    events: Iterable[Any] | None = None
    cut: bool = False
    """The stream ends in the middle of a line."""


@dataclass
class ApiServer:
    """Answers as `reply` says, and remembers what it was asked."""

    reply: Callable[[Asked], Answer]
    kubeconfig: Path
    asked: list[Asked] = field(default_factory=list)


@contextmanager
def serving(folder: Path, reply: Callable[[Asked], Answer]) -> Iterator[ApiServer]:
    """Such a server on a free port."""
    served = ApiServer(reply, folder / "kubeconfig")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked = Asked(self.command, url.path, query, json.loads(body) if body else None)
            served.asked.append(asked)
            answer = served.reply(asked)
            with suppress(ConnectionError):  # a client need not wait for all of it
                if answer.events is None:
                    self._send(answer.status, json.dumps(answer.body).encode())
                else:
                    self._stream(answer)

        do_POST = do_DELETE = do_GET

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _stream(self, answer: Answer) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Connection", "close")
            self.end_headers()
            for event in answer.events or ():
                self.wfile.write(json.dumps(event).encode() + b"\n")
            if answer.cut:
                self.wfile.write(b'{"type": "MODI')
            self.close_connection = True

        def log_message(self, *_arguments: Any) -> None:
            """Tests tell what they were asked."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    served.kubeconfig.write_text(
        json.dumps(
            {
                "clusters": [{"name": "c", "cluster": {"server": address}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def thing(name: str, version: int, **more: Any) -> dict[str, Any]:
    """An object of some kind."""
    return {"metadata": {"name": name, "uid": name, "resourceVersion": str(version)}, **more}


def listed(version: int, *items: dict[str, Any]) -> Answer:
    """A list as of a version."""
    return Answer({"metadata": {"resourceVersion": str(version)}, "items": list(items)})


def refusal(status: int, message: str) -> Answer:
    """What the API server says when it says no."""
    return Answer({"kind": "Status", "code": status, "message": message}, status=status)
