"""Servers of one stage beside denoising (encoding, decoding), one queue before them. Pure."""

from __future__ import annotations

from heapq import heapify, heapreplace


class Pool:
    """First come, first served, by whichever server is free first.

    Args:
        servers: at least 1.
    """

    def __init__(self, servers: int) -> None:
        self._free_s = [0.0] * servers
        heapify(self._free_s)
        self.busy_s = 0.0
        """Of all servers together, so far taken on."""

    def serve(self, now: float, seconds: float) -> float:
        """When a task that comes now and takes `seconds` ends; tasks come in order of time."""
        ends = max(now, self._free_s[0]) + seconds
        heapreplace(self._free_s, ends)
        self.busy_s += seconds
        return ends
