"""Spans over OTLP/HTTP. Importing this needs the extra `tracing`; see `service.spec.spans`.

The SDK does the work. Around it stands what makes that fit to run beside a job:

- Spans are handed to a thread, which sends them in batches and drops what finds no room. So a span
  costs some microseconds, whether the receiver is quick, slow or not there.
- The SDK and its exporter complain at every batch. They are muted here; whoever opens a tracer is
  told once that spans get lost, and why, and not again.
- The SDK waits for up to 30 s at the end. `close` and `flush` wait for as long as they are told.
- The SDK draws ids from Python's `random`, which environments and libraries seed. Ranks that are
  seeded alike would then make the same ids, and every span would change the draws that follow. So
  ids come from the operating system.
- What fails is named by the error's type alone: messages may hold what a user sent.

Sampling and the batches follow the SDK's own variables (OTEL_TRACES_SAMPLER, OTEL_BSP_...).
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Value = str | int | float | bool

_W3C = TraceContextTextMapPropagator()
_TRACES_PATH = "/v1/traces"
_LONGEST_VALUE = 256
_MUTED = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")


class _Complaint(logging.Handler):
    """Keeps the last thing that the muted ones have said, on one line."""

    text = "no answer in time"

    def emit(self, record: logging.LogRecord) -> None:
        """Called for each of their lines."""
        self.text = " ".join(record.getMessage().split())[:_LONGEST_VALUE]


_complaint = _Complaint(logging.WARNING)


class Tracer:
    """Makes spans of one process and sends them.

    Args:
        endpoint: base URL of an OTLP/HTTP receiver.
        service: `service.name` of the spans, as `planish-driver`.
        tell: is told, once, that spans are lost; it is called from a thread.
    """

    def __init__(self, endpoint: str, service: str, tell: Callable[[str], None]) -> None:
        for name in _MUTED:
            logging.getLogger(name).propagate = False
            logging.getLogger(name).addHandler(_complaint)
        self._exporter = _Exporter(endpoint, tell)
        self._processor = BatchSpanProcessor(self._exporter)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service, "process.pid": os.getpid()}),
            id_generator=_SystemIds(),
            span_limits=SpanLimits(max_span_attribute_length=_LONGEST_VALUE),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("planish")

    @contextmanager
    def span(
        self,
        name: str,
        attributes: Mapping[str, Value],
        *,
        under: Context | None = None,
        serves: bool = False,
    ) -> Iterator[Span]:
        """The block is a span, and the parent of spans that are made in it.

        Args:
            name: of the span.
            attributes: what is known of it at its start.
            under: what it is a child of (`parent`); None is the span around it.
            serves: it answers somebody else's request.
        """
        kind = SpanKind.SERVER if serves else SpanKind.INTERNAL
        span = self._tracer.start_span(name, under, kind, attributes)
        token = contexts.attach(trace.set_span_in_context(span))
        try:
            yield span
        except BaseException as error:
            failed(type(error).__name__)
            raise
        finally:
            contexts.detach(token)
            span.end()

    def flush(self, seconds: float) -> None:
        """Sends what is there, for so long at most."""
        self._bounded(self._processor.force_flush, seconds)

    def close(self, seconds: float) -> None:
        """Sends what is there, for so long at most; later spans are not sent."""
        self._bounded(self._provider.shutdown, seconds)

    def _bounded(self, work: Callable[[], object], seconds: float) -> None:
        thread = threading.Thread(target=work, name="last-spans", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            self._exporter.lost()


def parent(traceparent: str | None) -> Context:
    """What spans are made under that are children of it; of none or a wrong one, roots."""
    return _W3C.extract({"traceparent": traceparent or ""}, context=Context())


def traceparent() -> str | None:
    """The span around, in W3C's form; None where there is none."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return carrier.get("traceparent")


def note(attributes: Mapping[str, Value]) -> None:
    """Adds to what is known of the span around."""
    trace.get_current_span().set_attributes(attributes)


def failed(error_type: str) -> None:
    """Marks the span around as failed, and says by what kind of error."""
    span = trace.get_current_span()
    span.set_attribute("error.type", error_type)
    span.set_status(StatusCode.ERROR)


class _Exporter(OTLPSpanExporter):
    """Tells once that spans are lost."""

    def __init__(self, endpoint: str, tell: Callable[[str], None]) -> None:
        base = endpoint.rstrip("/")
        super().__init__(base if base.endswith(_TRACES_PATH) else base + _TRACES_PATH)
        self._base, self._tell, self._told = base, tell, threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.lost()
        return result

    def lost(self) -> None:
        """Some spans did not get there."""
        if self._told.acquire(blocking=False):  # never given back: once is enough
            self._tell(
                f"traces are not taken at {self._base} ({_complaint.text}); what is not taken is "
                "dropped, and nothing else suffers. This is said once"
            )


class _SystemIds(IdGenerator):
    """Ids that no seed decides."""

    def generate_span_id(self) -> int:
        return int.from_bytes(os.urandom(8)) or 1

    def generate_trace_id(self) -> int:
        return int.from_bytes(os.urandom(16)) or 1
