"""Several servers as one, as a request-level balancer has it: each request to the one with the fewest in flight."""

from __future__ import annotations

from collections.abc import Sequence

from giornata_lab.loadgen.driver import Send
from giornata_lab.loadgen.outcomes import ServerAnswer
from giornata_lab.loadgen.workload import WorkloadRequest


class LeastInFlight:
    """Sends every request to the server that has the fewest without an answer; among equals, the one used longest ago.

    Args:
        servers: one or more.
    """

    def __init__(self, servers: Sequence[Send]) -> None:
        self._servers = servers
        self._in_flight = [0] * len(servers)
        self._turns = list(range(-len(servers), 0))
        """When each was last used."""
        self._turn = 0

    async def send(self, request: WorkloadRequest) -> ServerAnswer:
        """Have one of the servers answer."""
        place = min(range(len(self._servers)), key=lambda at: (self._in_flight[at], self._turns[at]))
        self._turn += 1
        self._turns[place] = self._turn
        self._in_flight[place] += 1
        try:
            return await self._servers[place](request)
        finally:
            self._in_flight[place] -= 1
