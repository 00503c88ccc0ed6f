"""Ctrl-C and SIGTERM: the first asks for an orderly end, the second ends the program at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Final

INTERRUPTED: Final = 130
SHOW_CURSOR: Final = "\x1b[?25h"
"""A progress bar hides it."""


def run(main: Callable[[], Awaitable[int]]) -> int:
    """Run `main`; the first signal cancels it, so that it can tidy up and say so, a second exits.

    Returns:
        What `main` returns, or 130 where the signal ended it.
    """

    async def supervised() -> int:
        task = asyncio.ensure_future(main())
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            if task.cancelling():
                sys.stderr.write(SHOW_CURSOR if sys.stderr.isatty() else "")
                sys.stderr.flush()
                os._exit(INTERRUPTED)  # not sys.exit: that would wait for what is being tidied up
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        try:
            return await task
        except asyncio.CancelledError:
            sys.stderr.write("Stopped.\n")
            return INTERRUPTED

    return asyncio.run(supervised())
