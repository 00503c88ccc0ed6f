"""How a command that runs a stack ends."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable

import structlog

from giornata.logs import configure_logs
from giornata_tools import interrupts
from giornata_tools.launcher.process import LaunchError

log = structlog.get_logger(__name__)


def say(text: str) -> None:
    """Print a line for the person who runs the program; none is worth its end."""
    interrupts.tell(f"{text}\n", ordinary=True)


def run(name: str, main: Callable[[], Awaitable[int]]) -> int:
    """Run `main` to the exit status: its own; 1 with a sentence on standard error; 130 after a signal."""
    configure_logs("error", "console", name)
    try:
        # A second signal ends the processes at once, and still removes temporary folders.
        return interrupts.run(main, told="\nStopping; once more to stop at once.\n", end=sys.exit)
    except LaunchError as error:
        interrupts.tell(f"{error}\n")
    except Exception as error:  # the program's edge: a person reads a sentence last
        log.exception("unforeseen")
        interrupts.tell(f"{name} failed: {type(error).__name__}: {error}\n")
    return 1
