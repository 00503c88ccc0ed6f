"""Switching tracing on or off, once, when a process starts."""

from __future__ import annotations

import sys

import structlog

from giornata.seeing import spans
from giornata.wire.errors import Failed


def on(service: str, instance: str, url: str, share: float) -> None:
    """Send spans to the collector at `url`, and have every line of the log within a span name it.

    Raises:
        Failed: the extra ``traces`` is not installed.
    """
    try:
        from giornata.seeing import otlp  # noqa: PLC0415 - hundreds of modules, which nothing needs where it is off
    except ImportError as error:
        raise Failed(
            "GIORNATA_TRACES_URL is set, and what sends traces is not installed.",
            received=str(error.name),
            accepted="pip install 'giornata[traces]'",
        ) from error
    spans.switch(otlp.sending(service, instance, url, share))
    structlog.configure(processors=[otlp.add_ids, *structlog.get_config()["processors"]])


def off() -> None:
    """Have no library that is imported from now on find OpenTelemetry, unless it is in use already.

    Redis' client imports the SDK's metrics wherever they are installed, and has no switch for it: 40 ms and 3 MB of
    each process, for nothing. A None in :data:`sys.modules` is Python's own way to say that there is no such module.
    """
    sys.modules.setdefault("opentelemetry", None)  # type: ignore[arg-type]  # typeshed leaves the None out
