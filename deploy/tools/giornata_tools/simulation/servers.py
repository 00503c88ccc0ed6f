"""Servers of one stage beside denoising (encoding, decoding), one queue before them. Pure."""

from __future__ import annotations

from collections import deque

from giornata_tools.simulation.clock import Action
from giornata_tools.simulation.processors import Processors


class Servers:
    """First come, first served, by the first server that is free.

    Args:
        servers: at least 1.
        host: on whose processors they compute.
    """

    def __init__(self, servers: int, host: Processors) -> None:
        self._free, self._host = servers, host
        self._waiting: deque[tuple[float, Action]] = deque()

    def serve(self, seconds: float, now: float, then: Action) -> None:
        """Run `then` when a server has done work that takes so long alone; at once where there is none."""
        if not seconds:
            then(now)
        elif self._free:
            self._free -= 1
            self._host.compute(seconds, now, lambda ended: self._served(then, ended))
        else:
            self._waiting.append((seconds, then))

    def _served(self, then: Action, now: float) -> None:
        self._free += 1
        if self._waiting:
            seconds, following = self._waiting.popleft()
            self.serve(seconds, now, following)
        then(now)
