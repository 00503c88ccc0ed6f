"""Spans of this process, kept in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from giornata import tracing
from giornata.otlp import OtlpTracer


@contextmanager
def telling(share: float = 1.0) -> Iterator[InMemorySpanExporter]:
    """Tracing is on while inside; yields where spans go."""
    exporter = InMemorySpanExporter()
    before = tracing.switch(OtlpTracer("test", "i", share, SimpleSpanProcessor(exporter)))
    try:
        yield exporter
    finally:
        tracing.close()
        tracing.switch(before)
