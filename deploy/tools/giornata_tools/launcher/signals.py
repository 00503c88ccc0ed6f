"""Ctrl-C and SIGTERM: the first asks for an orderly end, the second ends everything at once."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Final

import uvloop

INTERRUPTED: Final = 130


def run(main: Callable[[], Awaitable[int]]) -> int:
    """Run `main` in a loop of its own; the first signal cancels it, so that it can tidy up, a second exits.

    The warden ends the processes that a second signal leaves behind.

    Returns:
        What `main` returns, or 130 where a signal cancelled it.
    """

    async def supervised() -> int:
        task = asyncio.ensure_future(main())
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            if task.cancelling():
                sys.exit(INTERRUPTED)
            sys.stderr.write("\nStopping; once more to stop at once.\n")
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        try:
            return await task
        except asyncio.CancelledError:
            return INTERRUPTED

    return uvloop.run(supervised())
