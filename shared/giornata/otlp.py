"""Spans by OpenTelemetry's SDK, sent by OTLP over HTTP. Needs the extra ``traces``; imported only where it is on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, MutableMapping
from typing import Any, Final, Self, Unpack

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from giornata import __version__
from giornata.tracing import (
    NO_SPAN,
    NO_STEPS,
    STEPS,
    TRACEPARENT,
    Headers,
    Span,
    SpanAttributes,
    StepSpans,
    TraceSpanKind,
    attribute,
)
from giornata.wire.errors import GiornataError

PATH: Final = "/v1/traces"
"""OTLP's, behind the collector's address."""
EXPORT_S: Final = 5.0
"""Longest try to reach the collector. Meanwhile 2,048 spans wait, and more are dropped."""

_W3C: Final = TraceContextTextMapPropagator()


def sending(service: str, instance: str, url: str, share: float) -> OtlpTracer:
    """A tracer whose spans go to the collector at `url`.

    `share` of the traces that begin here are told; a trace that came with a ``traceparent`` is told as that says.
    """
    logging.getLogger("opentelemetry.trace.span").setLevel(
        logging.ERROR
    )  # or it repeats a stranger's tracestate
    exporter = OTLPSpanExporter(endpoint=url.rstrip("/") + PATH, timeout=EXPORT_S)
    return OtlpTracer(service, instance, share, BatchSpanProcessor(exporter))


class OtlpTracer:
    """Makes the spans of :mod:`giornata.tracing`; ended ones go to `processor`."""

    def __init__(self, service: str, instance: str, share: float, processor: SpanProcessor) -> None:
        resource = {
            "service.name": f"giornata-{service}",
            "service.instance.id": instance,
            "service.version": __version__,
        }
        sampler = ParentBased(TraceIdRatioBased(share))
        self._provider = TracerProvider(sampler=sampler, resource=Resource(resource), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("giornata")

    def span(
        self,
        name: str,
        kind: TraceSpanKind,
        *,
        root: bool,
        parent: Headers | None,
        links: Iterable[str],
        began_ago_s: float,
        told: SpanAttributes,
    ) -> Span:
        """See :func:`giornata.tracing.span`."""
        within = contexts.get_current() if parent is None else _extracted(parent)
        if not root and not _context_of(within).trace_flags.sampled:
            return NO_SPAN
        made = self._tracer.start_span(
            name,
            context=within,
            kind=SpanKind[kind.value.upper()],
            attributes=_attributes(told),
            links=[trace.Link(_context_of(_extracted({TRACEPARENT: link}))) for link in links if link],
            start_time=_ago_ns(began_ago_s),
        )
        return _OtlpSpan(self._tracer, made, within, kind)

    def headers(self) -> dict[str, str] | None:
        """See :func:`giornata.tracing.headers`."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier)
        return carrier or None

    def close(self) -> None:
        """Send what is left; a collector that does not answer holds up nothing for long."""
        self._provider.force_flush(int(EXPORT_S * 1e3))
        self._provider.shutdown()


def add_ids(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor of structlog: a line that is written within a span names trace and span."""
    spoken = trace.get_current_span().get_span_context()
    if spoken.is_valid:
        event["trace_id"] = trace.format_trace_id(spoken.trace_id)
        event["span_id"] = trace.format_span_id(spoken.span_id)
    return event


class _OtlpSpan(Span):
    def __init__(self, tracer: trace.Tracer, made: trace.Span, within: Context, kind: TraceSpanKind) -> None:
        self._tracer, self._made, self._kind = tracer, made, kind
        self._context = trace.set_span_in_context(made, within)

    def __enter__(self) -> Self:
        self._token = contexts.attach(self._context)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        contexts.detach(self._token)
        if isinstance(error, GiornataError):
            if (
                self._kind is TraceSpanKind.ANSWERS and error.status < 500
            ):  # what was asked is wrong, not who answers
                self.note(code=error.code)
            else:
                self.fail(error.code)
        elif error is not None:
            self.fail("cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__)
        self._made.end()

    def note(self, **told: Unpack[SpanAttributes]) -> None:
        self._made.set_attributes(_attributes(told))

    def event(self, name: str, **told: Unpack[SpanAttributes]) -> None:
        self._made.add_event(name, _attributes(told))

    def fail(self, code: str) -> None:
        self.note(code=code)
        self._made.set_status(Status(StatusCode.ERROR))

    @property
    def traceparent(self) -> str | None:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self._context)
        return carrier.get(TRACEPARENT)

    def steps(self) -> StepSpans:
        return _OtlpStepSpans(self._tracer, self._context) if self._made.is_recording() else NO_STEPS


class _OtlpStepSpans(StepSpans):
    def __init__(self, tracer: trace.Tracer, within: Context) -> None:
        self._tracer, self._within, self._count = tracer, within, 0
        self._rest_ns: tuple[int, int] | None = None

    def add(self, began_ago_s: float, ended_ago_s: float, **told: Unpack[SpanAttributes]) -> None:
        self._count += 1
        began_ns, ended_ns = _ago_ns(began_ago_s), _ago_ns(ended_ago_s)
        if self._count <= STEPS:
            self._tell("step", began_ns, ended_ns, told)
            return
        self._rest_ns = (began_ns if self._rest_ns is None else self._rest_ns[0], ended_ns)

    def close(self) -> None:
        if self._rest_ns is not None:
            self._tell("steps", *self._rest_ns, {"steps": self._count - STEPS})
            self._rest_ns = None

    def _tell(self, name: str, began_ns: int, ended_ns: int, told: SpanAttributes) -> None:
        self._tracer.start_span(name, self._within, attributes=_attributes(told), start_time=began_ns).end(
            ended_ns
        )


def _attributes(told: SpanAttributes) -> dict[str, Any]:
    return {attribute(name): value for name, value in told.items()}


def _ago_ns(seconds: float) -> int:
    return time.time_ns() - int(seconds * 1e9)


def _extracted(headers: Headers) -> Context:
    """The context of a message; names of headers are read as HTTP's, whatever their case."""
    return _W3C.extract({name.lower(): value for name, value in headers.items()}, Context())


def _context_of(within: Context) -> trace.SpanContext:
    return trace.get_current_span(within).get_span_context()
