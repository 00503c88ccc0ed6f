"""What packed blocks tell of their time: spans on lanes. Pure."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Final, Protocol


class TraceLane(StrEnum):
    """Lines of a trace."""

    STEP = "steps"
    COMPUTE = "compute"
    WAIT = "wait"
    """Part of computing: for a load."""
    LOAD = "load"


class LaneTracer(Protocol):
    """Takes in spans, or nothing."""

    def span(self, lane: TraceLane, name: str, **arguments: object) -> AbstractContextManager[None]:
        """What is done within, on the current stream of the current thread."""


class NullLaneTracer:
    """Takes in nothing."""

    def span(self, lane: TraceLane, name: str, **arguments: object) -> AbstractContextManager[None]:  # noqa: ARG002 - protocol
        """Record nothing."""
        return nullcontext()


UNTRACED: Final = NullLaneTracer()
