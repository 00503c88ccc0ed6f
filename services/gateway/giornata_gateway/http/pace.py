"""How long a request's body may take."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager

from giornata_gateway.config import GatewayConfig


class ReceiveTimeout:
    """Moves a time limit with what has come, up to where it is set."""

    def __init__(self, config: GatewayConfig, limit: asyncio.Timeout) -> None:
        self._config, self._limit = config, limit
        self._latest_s = limit.when() or math.inf
        self._first_s = asyncio.get_running_loop().time() + config.head_s
        self.total_bytes = 0
        """What has come."""
        self.come(0)

    def come(self, size_bytes: int) -> None:
        """Allow the time that what has come takes at the slowest pace."""
        self.total_bytes += size_bytes
        paced_s = self._first_s + self.total_bytes / self._config.receive_bytes_per_s
        self._limit.reschedule(min(self._latest_s, paced_s))

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Time that is not the client's: it waits for another service meanwhile."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self._limit.reschedule(None if math.isinf(self._latest_s) else self._latest_s)
        yield
        self._first_s += loop.time() - began_s
        self.come(0)
