"""What the engine tells of its time: spans on lanes. Pure; :mod:`giornata_denoiser.trace` takes them in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Final, Protocol


class Lane(StrEnum):
    """Lines of a trace."""

    STEP = "steps"
    COMPUTE = "compute"
    WAIT = "wait"
    """Part of computing: for a load."""
    LOAD = "load"


class Tracing(Protocol):
    """Takes in spans, or nothing."""

    def span(self, lane: Lane, name: str, **arguments: object) -> AbstractContextManager[None]:
        """What is done within, on the current stream of the current thread."""


class Untraced:
    """Takes in nothing."""

    def span(self, lane: Lane, name: str, **arguments: object) -> AbstractContextManager[None]:  # noqa: ARG002 - protocol
        """Of no interest."""
        return nullcontext()


UNTRACED: Final = Untraced()
