"""How long a step has waited for loads. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class WaitTimer:
    """Adds up how long a step has waited for loads, by a clock of monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.total_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for a load within the context."""
        began = self._clock()
        try:
            yield
        finally:
            self.total_s += self._clock() - began
