"""The log of a process: one line an event, for people or as JSON, without secrets and without a stranger's escapes.

What libraries log by :mod:`logging` takes the same way, so that no line leaves by another. The stream may be full,
broken or closed: no process ends for want of a log line.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, Final

import structlog

LIBRARY_CHARACTERS: Final = 500
"""A library's message is cut to this length: it may repeat what a stranger has sent."""
_SECRETS: Final = re.compile(
    r"gio_[\w-]{8,}|whsec_[\w+/=]+|(?<=://)[^\s/@]+(?=@)|(?i:(?<=bearer )|(?<=basic ))[^\s'\"]{16,}"
)
"""API keys, secrets of webhooks, users and passwords in addresses, and what stands in an Authorization header."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""What moves a terminal's cursor, colours it, names its window, or turns the direction of its text."""

log = structlog.get_logger(__name__)


def configure_logs(level: str, form: str, instance: str) -> None:
    """Log to standard error, in lines for people or JSON; every line names the instance. It never raises."""
    structlog.contextvars.bind_contextvars(instance=instance)
    people, stream = form != "json", sys.stderr
    render: Any = (
        structlog.dev.ConsoleRenderer(colors=False) if people else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            *([_shown] if people else []),
            lambda logger, method, event: without_secrets(render(logger, method, event)),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: LogSink(stream),
        cache_logger_on_first_use=True,
    )
    others = [handler for handler in logging.root.handlers if not isinstance(handler, _LibraryLines)]
    logging.root.handlers = [*others, _LibraryLines(logging.WARNING)]


def end_logs() -> None:
    """Let go of lines that the stream does not take: Python would try them once more, and end with a status of 120."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.stderr = None  # as Python has it where there is none


def escape_controls(text: str, kept: str = "") -> str:
    """`text` with its control characters as escapes, but for those in `kept`, so that a terminal obeys none."""
    return _CONTROL.sub(lambda found: found[0] if found[0] in kept else ascii(found[0])[1:-1], text)


def without_secrets(text: str) -> str:
    """`text` without API keys, passwords and other secrets."""
    return _SECRETS.sub("***", text)


def _shown(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor of structlog: texts stay on their line; those of a traceback are indented, so that none is forged."""
    for name, value in event.items():
        if isinstance(value, str):
            traceback = name == "exception"
            event[name] = (
                escape_controls(value, "\n").replace("\n", "\n  ") if traceback else escape_controls(value)
            )
    return event


class LogSink(structlog.PrintLogger):
    """Prints lines to a stream; a line that cannot be written is counted in :attr:`lost`, and nothing is raised."""

    lost = 0
    """Lines that this process could not write."""

    def msg(self, message: str) -> None:
        """Write one line."""
        try:
            super().msg(message)
        except (OSError, ValueError):  # ValueError: the stream is closed
            LogSink.lost += 1

    log = debug = info = warn = warning = fatal = failure = err = error = critical = exception = msg


class _LibraryLines(logging.Handler):
    """A handler that writes libraries' messages as lines of this process's log."""

    def emit(self, record: logging.LogRecord) -> None:
        told = {"library": record.name, "message": record.getMessage()[:LIBRARY_CHARACTERS]}
        log.log(min(record.levelno, logging.CRITICAL), "library_message", **told, exc_info=record.exc_info)
