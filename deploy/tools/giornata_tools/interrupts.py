"""Ctrl-C and SIGTERM: the first signal asks for an orderly end, the second ends the program at once."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import uvloop

from giornata.signals import on_signals

INTERRUPTED: Final = 130
SHOW_CURSOR: Final = "\x1b[?25h"
"""A progress bar hides the cursor."""


def tell(text: str, *, ordinary: bool = False) -> None:
    """Write to standard error, or the `ordinary` output; where that is a full disk or closed, do nothing."""
    with suppress(OSError):
        print(text, end="", flush=True, file=sys.stdout if ordinary else sys.stderr)


def run(
    main: Callable[[], Awaitable[int]], *, told: str = "", end: Callable[[int], object] = os._exit
) -> int:
    """Run `main` in a loop of its own; the first signal cancels it, so that it can tidy up.

    Args:
        main: returns the exit status; a signal makes it 130.
        told: goes to standard error at the first signal.
        end: ends the program at the second signal. ``os._exit`` waits for nothing; ``sys.exit`` cancels what tidies up
            and waits for that.
    """

    async def supervised() -> int:
        task = asyncio.ensure_future(main())

        def first(_: str) -> None:
            task.cancel()
            tell(told)

        def second(_: str) -> None:
            tell(SHOW_CURSOR if sys.stderr.isatty() else "")
            end(INTERRUPTED)

        on_signals(first, second)
        try:
            return await task
        except asyncio.CancelledError:
            tell("Stopped.\n")
            return INTERRUPTED

    return uvloop.run(supervised())
