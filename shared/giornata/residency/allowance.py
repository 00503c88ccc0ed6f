"""A bandwidth for loads that can wait, of which loads that cannot take their part first. Pure."""

from __future__ import annotations


class LoadTokenBucket:
    """A token bucket that may be overdrawn: what demand takes is not there for planned loads. Times are in seconds.

    A limiter that only makes its callers wait cannot say this: demand never waits.

    Args:
        bytes_per_s: how fast it fills.
        burst_s: so many seconds' worth it holds at most, and owes at most.
    """

    def __init__(self, bytes_per_s: float, burst_s: float = 1.0) -> None:
        self._bytes_per_s, self._most = bytes_per_s, bytes_per_s * burst_s
        self._left_bytes, self._at_s = self._most, 0.0

    def spend(self, size_bytes: int, now: float) -> None:
        """Bytes that were loaded, whether there was an allowance or not."""
        self._fill(now)
        self._left_bytes = max(-self._most, self._left_bytes - size_bytes)

    def wait_s(self, now: float) -> float:
        """Time until a planned load may go on; 0 where it may now."""
        self._fill(now)
        return max(0.0, -self._left_bytes / self._bytes_per_s)

    def _fill(self, now: float) -> None:
        self._left_bytes += max(0.0, now - self._at_s) * self._bytes_per_s
        self._left_bytes = min(self._most, self._left_bytes)
        self._at_s = max(self._at_s, now)
