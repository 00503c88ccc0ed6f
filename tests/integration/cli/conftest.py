"""Commands in this process, against servers in its event loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

import pytest
import structlog
from click.testing import CliRunner, Result

from giornata_tools.cli.app import cli

Run = Callable[..., Awaitable[Result]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in a thread, since it has an event loop of its own: ``await run("lora", "list")``.

    The services' logs are not in its output; and only the main thread may set signal handlers.
    """
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))
    monkeypatch.setattr("giornata_tools.terminal.run", lambda main: asyncio.run(main()))
    return lambda *words: asyncio.to_thread(CliRunner().invoke, cli, words)
