"""Spans of this process: told to a collector where tracing is switched on, nothing where it is off.

Off, :func:`span` returns one value that exists once, and no module of OpenTelemetry is imported. On,
:mod:`giornata.otlp` makes the spans. The present span belongs to the running task and to the tasks that it creates.

A trace begins at a door of a gateway. Elsewhere a span needs another around it, unless it is a `root`: so nothing is
told of what no edit waits for, and of an edit that is not sampled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Self, TypedDict, Unpack

import structlog

from giornata.wire.errors import Failed

if TYPE_CHECKING:
    from giornata.otlp import OtlpTracer


class SpanAttributes(TypedDict, total=False):
    """Attributes by name. A span tells these and nothing else: no prompt, key, file or tenant has a name here."""

    job: str
    model: str
    task: str
    """``edit`` or ``generate``."""
    attempt: int
    tries: int
    """Which try of a question this is, 1 for the first."""
    index: int
    """The picture's index within its job."""
    rows: int
    """Pictures."""
    steps: int
    """Steps that the span stands for."""
    batch_rows: int
    """Pictures in the batch that a step computed."""
    tokens: int
    """Image tokens that a step computed, of all rows of the batch."""
    mask_ratio: float
    worker: str
    """A denoiser's instance, or a prepost's that is asked."""
    predicted_ms: float
    """From the decision to the job's last step, as the router expects."""
    outcome: str
    """How an attempt ended."""
    template: str
    """What a template did for an edit."""
    state: str
    """The terminal state of a job."""
    wait_ms: float
    """From acceptance to the first step."""
    compute_ms: float
    """Time in the process, thread or device that computed."""
    load_wait_ms: float
    """Part of a step: it waited for what a recording's blocks take."""
    loaded_bytes: int
    bytes: int
    """Size of a blob."""
    code: str
    """An error's stable code, or the name of its class."""
    method: str
    route: str
    """With names for what differs from request to request."""
    status: int
    """HTTP status code."""
    subject: str
    """Kind of the NATS subject."""


NAMES: Final = {
    "code": "error.type",
    "method": "http.request.method",
    "route": "http.route",
    "status": "http.response.status_code",
    "subject": "messaging.destination.name",
}
"""Attributes that OpenTelemetry's conventions name; every other is ``giornata.`` and its name."""


def attribute(name: str) -> str:
    """The attribute's name in OpenTelemetry."""
    return NAMES.get(name, f"giornata.{name}")


class TraceSpanKind(StrEnum):
    """The side of a message that a span is on."""

    INSIDE = "internal"
    ASKS = "client"
    ANSWERS = "server"
    TAKES = "consumer"
    """From a queue."""


TRACEPARENT: Final = "traceparent"
"""The header of W3C Trace Context."""
STEPS: Final = 100
"""Most steps of an attempt that have a span each; one span stands for all later ones."""
Headers = Mapping[str, str]


class StepSpans:
    """Steps of one attempt. This class tells nothing."""

    def add(self, began_ago_s: float, ended_ago_s: float, **told: Unpack[SpanAttributes]) -> None:
        """A step that has ended."""

    def close(self) -> None:
        """The last one has ended."""


class Span:
    """A span from entering to leaving. This class tells nothing: :func:`span` returns it where tracing is off."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """End the span. An error that passes is told by its code, never by its text."""

    def note(self, **told: Unpack[SpanAttributes]) -> None:
        """Add attributes."""

    def event(self, name: str, **told: Unpack[SpanAttributes]) -> None:
        """Return what happened within, now."""

    def fail(self, code: str) -> None:
        """The span ends in an error that does not pass as an exception."""

    @property
    def traceparent(self) -> str | None:
        """Return how others may link to the span; None where nothing is told."""
        return None

    def steps(self) -> StepSpans:
        """Takes in the steps that are computed within."""
        return NO_STEPS


NO_STEPS: Final = StepSpans()
NO_SPAN: Final = Span()


_tracer: OtlpTracer | None = None


def switch(tracer: OtlpTracer | None) -> OtlpTracer | None:
    """Have `tracer` make the spans of this process from now on, or nothing; the one before."""
    global _tracer  # one for the process, as for logs
    before, _tracer = _tracer, tracer
    return before


def is_on() -> bool:
    """Return whether spans are told at all."""
    return _tracer is not None


def span(
    name: str,
    kind: TraceSpanKind = TraceSpanKind.INSIDE,
    *,
    root: bool = False,
    parent: Headers | None = None,
    links: Iterable[str] = (),
    began_ago_s: float = 0.0,
    **told: Unpack[SpanAttributes],
) -> Span:
    """Return what is done inside, below the present span.

    `parent`, headers with a ``traceparent``, takes the place of the present span; without a ``traceparent`` there is
    none. `links` are the ``traceparent`` of spans that this one follows, such as an attempt that was lost.
    """
    if _tracer is None:
        return NO_SPAN
    return _tracer.span(name, kind, root=root, parent=parent, links=links, began_ago_s=began_ago_s, told=told)


def past(name: str, began_ago_s: float, **told: Unpack[SpanAttributes]) -> None:
    """A span that ends now, and had begun before it was known."""
    if _tracer is not None:
        with span(name, began_ago_s=began_ago_s, **told):
            pass


def headers() -> dict[str, str] | None:
    """Return what a message of the present span carries; None where there is no span, so that it needs no headers."""
    return None if _tracer is None else _tracer.headers()


def traceparent() -> str | None:
    """The present span, as a ``traceparent``."""
    told = headers()
    return None if told is None else told[TRACEPARENT]


def below(traceparent: str | None) -> Headers:
    """The headers of a span's children, where only its ``traceparent`` has travelled."""
    return {} if traceparent is None else {TRACEPARENT: traceparent}


def close() -> None:
    """Tell what is left, and go on without tracing."""
    tracer = switch(None)
    if tracer is not None:
        tracer.close()


def switch_on(service: str, instance: str, url: str, share: float) -> None:
    """Send spans to the collector at `url`, and have every line of the log within a span name it.

    Raises:
        Failed: the extra ``traces`` is not installed.
    """
    try:
        from giornata import otlp  # noqa: PLC0415 - hundreds of modules, which nothing needs where it is off
    except ImportError as error:
        raise Failed(
            "GIORNATA_TRACES_URL is set, and what sends traces is not installed.",
            received=str(error.name),
            accepted="pip install 'giornata[traces]'",
        ) from error
    switch(otlp.sending(service, instance, url, share))
    structlog.configure(processors=[otlp.add_ids, *structlog.get_config()["processors"]])


def switch_off() -> None:
    """Have no library that is imported from now on find OpenTelemetry, unless it is in use already.

    Redis' client imports the SDK's metrics wherever they are installed, and has no switch for it: 40 ms and 3 MB of
    each process, for nothing. A None in :data:`sys.modules` is Python's own way to say that there is no such module.
    """
    sys.modules.setdefault("opentelemetry", None)  # type: ignore[arg-type]  # typeshed leaves the None out
