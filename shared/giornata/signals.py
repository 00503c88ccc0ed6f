"""SIGINT and SIGTERM in a running loop: the first signal asks for an orderly end, any later one ends at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from itertools import chain, repeat


def on_signals(first: Callable[[str], None], later: Callable[[str], None]) -> None:
    """Have the running loop call `first` at the first SIGINT or SIGTERM and `later` at every other one.

    Both take the signal's name.
    """
    reactions = chain([first], repeat(later))

    def react(name: str) -> None:
        next(reactions)(name)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, react, number.name)
