"""A receiver of traces: OTLP over HTTP with protobuf, as a collector takes it."""

import gzip
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from tests.waiting import wait_until


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One span; ids in hexadecimal, times in seconds since the epoch."""

    trace: str
    id: str
    parent: str
    """Empty for a root."""
    name: str
    kind: int
    start: float
    end: float
    failed: bool
    attributes: Mapping[str, Any]
    service: str
    pid: int

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace}-{self.id}-01"


class Receiver:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self._spans: list[Received] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                assert self.headers["content-type"] == "application/x-protobuf"
                receiver.take(body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self._spans += _spans(request)
        self.bodies.append(body)

    def spans(self, **matching: Any) -> list[Received]:
        """Those with these values, in the order of their starts."""
        found = [s for s in self._spans if all(getattr(s, k) == v for k, v in matching.items())]
        return sorted(found, key=lambda span: span.start)

    def wait_for(
        self, condition: Callable[["Receiver"], object], seconds: float = 60.0
    ) -> "Receiver":
        """Returns once the condition holds."""
        wait_until(
            lambda: condition(self),
            "the spans have come",
            seconds,
            details=lambda: f"there are {[span.name for span in self.spans()]}",
        )
        return self


@contextmanager
def open_receiver() -> Iterator[Receiver]:
    """A receiver on a free port of the loopback interface."""
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        receiver.server.server_close()
        thread.join()


def _spans(request: ExportTraceServiceRequest) -> Iterator[Received]:
    for group in request.resource_spans:
        resource = _mapping(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield Received(
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    name=span.name,
                    kind=span.kind,
                    start=span.start_time_unix_nano / 1e9,
                    end=span.end_time_unix_nano / 1e9,
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                    attributes=_mapping(span.attributes),
                    service=resource["service.name"],
                    pid=resource["process.pid"],
                )


def _mapping(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair) for pair in pairs}


def _value(pair: KeyValue) -> Any:
    value: AnyValue = pair.value
    return getattr(value, str(value.WhichOneof("value")))
