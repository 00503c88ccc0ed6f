"""Spans of this process: told to a collector where tracing is switched on, nothing where it is off.

Off, :func:`span` returns one value that exists once, and no module of OpenTelemetry is imported. On,
:mod:`giornata.seeing.otlp` makes the spans. The present span belongs to the running task and to the tasks that it
creates.

A trace begins at a door of a gateway. Elsewhere a span needs another around it, unless it is a `root`: so nothing is
told of what no edit waits for, and of an edit that is not sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Protocol, Self, Unpack

from giornata.seeing.told import SpanAttributes, TraceSpanKind

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
        """What happened within, now."""

    def fail(self, code: str) -> None:
        """The span ends in an error that does not pass as an exception."""

    @property
    def traceparent(self) -> str | None:
        """How others may link to the span; None where nothing is told."""
        return None

    def steps(self) -> StepSpans:
        """Takes in the steps that are computed within."""
        return NO_STEPS


NO_STEPS: Final = StepSpans()
NO_SPAN: Final = Span()


class Tracer(Protocol):
    """Makes spans; see the functions of this module."""

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
        """See :func:`span`."""

    def headers(self) -> dict[str, str] | None:
        """See :func:`headers`."""

    def close(self) -> None:
        """Tell what is left, within seconds."""


_tracer: Tracer | None = None


def switch(tracer: Tracer | None) -> Tracer | None:
    """Have `tracer` make the spans of this process from now on, or nothing; the one before."""
    global _tracer  # one for the process, as for logs
    before, _tracer = _tracer, tracer
    return before


def on() -> bool:
    """Whether spans are told at all."""
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
    """What is done inside, below the present span.

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
    """What a message of the present span carries; None where there is no span, so that it needs no headers."""
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
