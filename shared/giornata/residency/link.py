"""A link over which loads come one after the other. Pure."""

from __future__ import annotations


class FifoLink:
    """First come, first served: a load takes a latency and its bytes over the bandwidth. Times are in seconds.

    Args:
        bytes_per_s: bandwidth.
        latency_s: what every load takes beside it.
    """

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self._free_s = 0.0
        """When the last load that was begun ends."""

    def takes_s(self, size_bytes: float) -> float:
        """Time of one load on an idle link."""
        return self._latency_s + size_bytes / self._bytes_per_s

    def wait_s(self, now: float) -> float:
        """Time until a new load would begin."""
        return max(0.0, self._free_s - now)

    def load(self, size_bytes: float, now: float) -> float:
        """Queue a load that may begin `now`; when it ends."""
        self._free_s = max(now, self._free_s) + self.takes_s(size_bytes)
        return self._free_s
