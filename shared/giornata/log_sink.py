"""Where log lines go: a stream that may be full, broken or closed. No process ends for want of a log line."""

from __future__ import annotations

from typing import Any

import structlog


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


class LogSinkFactory(structlog.PrintLoggerFactory):
    """Makes a :class:`LogSink` for each logger."""

    def __call__(self, *_: Any) -> LogSink:
        """A logger that prints to the factory's stream."""
        return LogSink(self._file)
