"""What the programs of this folder's stack have in common: arguments that count, and how a run of one ends."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable

import structlog

from giornata import runtime
from giornata_tools.launcher import signals
from giornata_tools.launcher.process import LaunchError

log = structlog.get_logger(__name__)


def count(text: str) -> int:
    """A number of 1 or more, for argparse.

    Raises:
        argparse.ArgumentTypeError: a smaller one.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, received {number}")
    return number


def run(name: str, main: Callable[[], Awaitable[int]]) -> int:
    """Run `main` to the exit status: its own; 1 with a sentence on standard error; 130 after a signal."""
    runtime.configure_logs("error", "console", name)
    try:
        return signals.run(main)
    except LaunchError as error:
        sys.stderr.write(f"{error}\n")
    except Exception as error:  # the program's edge: whatever it was, a person reads a sentence last
        log.exception("unforeseen")
        sys.stderr.write(f"{name} failed: {type(error).__name__}: {error}\n")
    return 1
