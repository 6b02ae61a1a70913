"""Traces, as far as service, driver and ranks have to agree on them; off unless wanted.

A job is one trace. Its root is the request that submitted it, or whatever the caller's
`traceparent` names. What the service does for the job later, each attempt's driver, and each call
of a rank are spans below it, made by different processes, days apart. So the place in the trace
(`JobTrace`) travels with the job: it is stored with it, stands in context.json, and goes along with
each call of a rank. A service that was restarted in between finds it there.

Nothing in this module needs OpenTelemetry. Only `service.spec.otlp` imports it, and only those who
have an address to send spans to import that one.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from service.spec.base import SpecModel

TRACEPARENT = r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"
"""W3C Trace Context, version 00: trace, span, flags."""


class SpanName(StrEnum):
    """Spans with a name of their own. Others are named after what they time: a request after its
    route, a phase of a step and a call of a rank after themselves."""

    OPEN = "open attempt"
    """The service writes an attempt down, which gives the job its place on the cluster."""
    SUBMIT = "submit attempt"
    """The service writes the attempt's files and hands it to the cluster."""
    END = "end attempt"
    """The service takes in what an attempt left behind, and writes down how it ended."""
    ATTEMPT = "attempt"
    """The life of an attempt's driver."""
    CHECKPOINTS = "open checkpoints"
    """It looks for what to go on from, and checks it."""
    CLUSTER = "start cluster"
    """Ray and the processes of the ranks are started."""
    DATA = "open data"
    """Rows and questions are read."""
    MODEL = "load model"
    """The models are built on the ranks; again where ranks were replaced."""
    STEP = "step"
    """One round of the loop: a training step, and the evaluation and the save that are due."""
    EVALUATION = "evaluation"
    """The model is evaluated."""
    CHECKPOINT = "checkpoint"
    """Training waits for a save. What goes on in the background is not in it."""
    EXPORT = "export"
    """The weights are written in Hugging Face's format."""


class JobTrace(SpecModel):
    """Where a job's spans go, and the span that they are children of."""

    endpoint: str
    """Base URL of an OTLP/HTTP receiver."""
    traceparent: Annotated[str, Field(pattern=TRACEPARENT)]
    """The parent, in the form of W3C Trace Context."""
