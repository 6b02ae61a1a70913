"""The spans of a driver and its ranks.

A driver runs one attempt, and a rank works for one driver. So each process has one tracer, and this
module holds it: whatever wants a span asks here, and without a tracer gets a block that does
nothing. Only `AttemptTrace` and `rank_span` open one, where the job has a place in a trace.

The driver is one thread, so the span around is the parent, and a call of the ranks takes it along
(`place`). Ranks never say that spans are lost: they share the driver's log, and it says so.

None of it may end a job or hold it up. A tracer that cannot be opened is a line in the log; the end
of an attempt waits for `RANKS_SECONDS` and `DRIVER_SECONDS` at most until the last spans are sent.
Spans that are not sent yet are lost where a process is killed: at most some seconds of them, since
the background thread sends what it has every five.
"""

import logging
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING

from service.spec import JobContext
from service.spec.layout import Layout
from service.spec.spans import JobTrace, SpanName

if TYPE_CHECKING:
    from service.spec.otlp import Tracer, Value

log = logging.getLogger("planish")

RANKS_SECONDS = 1.0
"""How long ranks may take to send their last spans."""
DRIVER_SECONDS = 1.0
"""How long the driver may take after that."""

_SAMPLED = 1
"""The bit of a traceparent's flags."""

_tracer: "Tracer | None" = None
_endpoint = ""


def span(name: str, step: int | None = None) -> AbstractContextManager[object]:
    """What makes a block a span, where this process makes any.

    Args:
        name: of the span.
        step: the training step that it belongs to.
    """
    if _tracer is None:
        return nullcontext()
    return _tracer.span(name, {} if step is None else {"planish.step": step})


def place() -> JobTrace | None:
    """The span around, for another process to make spans under; None where nothing is traced, or
    the trace was not chosen by the sampler."""
    if _tracer is None:
        return None
    from service.spec.otlp import traceparent

    found = traceparent()
    if found is None or not int(found[-2:], 16) & _SAMPLED:
        return None
    return JobTrace(endpoint=_endpoint, traceparent=found)


class AttemptTrace:
    """The span of an attempt, around all others of its driver; nothing where the job has none.

    Args:
        context: the job.
        attempt: the attempt's number.
    """

    def __init__(self, context: JobContext | None = None, attempt: int = 0) -> None:
        self._span = ExitStack()
        if context is None or context.trace is None:
            return
        try:
            _open(context.trace.endpoint, "planish-driver", tell=True)
        except Exception as error:  # not installed, or a variable of the SDK is wrong
            log.warning("no traces are made of this attempt: %r", error)
            return
        attributes: dict[str, Value] = {
            "planish.job_id": context.job_id,
            "planish.job_name": context.spec.name,
            "planish.algorithm": context.spec.algorithm.type,
            "planish.attempt": attempt,
        }
        self._span.enter_context(_under(context.trace, SpanName.ATTEMPT, attributes))

    def close(self, reason: str | None) -> None:
        """Ends the span and sends what is left, for `DRIVER_SECONDS` at most.

        Args:
            reason: why the attempt failed; None where it did not.
        """
        global _tracer
        tracer, _tracer = _tracer, None
        if tracer is None:
            return
        with suppress(Exception):  # whatever it is, the attempt has ended otherwise
            if reason is not None:
                from service.spec.otlp import failed, note

                note({"planish.reason": reason})
                failed(reason)
            self._span.close()
            tracer.close(DRIVER_SECONDS)


def rank_span(
    trace: JobTrace | None, method: str, layout: Layout, rank: int, group: str
) -> AbstractContextManager[object]:
    """The span of a call in a rank's process.

    Args:
        trace: what the driver sent along (`place`).
        method: the call.
        layout: of the ranks.
        rank: the number of this one.
        group: name of their group; empty for the ranks of training.
    """
    if trace is None:
        return nullcontext()
    with suppress(Exception):  # the driver has told of what may go wrong here
        _open(trace.endpoint, "planish-rank", tell=False)
        place = layout.coordinates(rank)
        attributes: dict[str, Value] = {"planish.rank": rank, "planish.group": group or "training"}
        for dimension in ("tp", "cp", "dp", "pp", "ep"):
            attributes[f"planish.{dimension}"] = getattr(place, dimension)
        return _under(trace, method, attributes)
    return nullcontext()


def note_own_seconds(seconds: float) -> None:
    """Adds to a rank's span how long the rank was at something of its own."""
    if _tracer is not None:
        from service.spec.otlp import note

        note({"planish.own_seconds": seconds})


def flush() -> None:
    """Sends a rank's spans, for `RANKS_SECONDS` at most."""
    if _tracer is not None:
        _tracer.flush(RANKS_SECONDS)


def _open(endpoint: str, service: str, *, tell: bool) -> None:
    global _tracer, _endpoint
    if _tracer is None:
        from service.spec.otlp import Tracer

        _tracer = Tracer(endpoint, service, log.warning if tell else _say_nothing)
        _endpoint = endpoint


def _under(
    trace: JobTrace, name: str, attributes: "dict[str, Value]"
) -> AbstractContextManager[object]:
    from service.spec.otlp import parent

    if _tracer is None:
        return nullcontext()
    return _tracer.span(name, attributes, under=parent(trace.traceparent))


def _say_nothing(_message: str) -> None:
    pass
