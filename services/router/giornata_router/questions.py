"""What prepost was asked: a question that no living instance says to have is lost, with its instance or its message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from giornata.fleet import Fleet, Heard
from giornata.wire.errors import DeadlineExceeded
from giornata.wire.workers import ServiceName, ServiceState


class Questions:
    """The open questions to prepost.

    Args:
        fleet: the live instances.
        connected: whether telemetry could be heard now.
    """

    def __init__(self, fleet: Fleet, connected: Callable[[], bool] = lambda: True) -> None:
        self._fleet, self._connected = fleet, connected
        self._heard = Heard[asyncio.Timeout]()
        """When a question was asked, or an instance last said to have it."""
        self._names: dict[asyncio.Timeout, str] = {}

    @asynccontextmanager
    async def asked(self, name: str) -> AsyncIterator[None]:
        """Ask and wait for the answer inside.

        Raises:
            DeadlineExceeded: no instance has the question, so that no answer will come.
        """
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._heard.hear(scope, time.monotonic())
                self._names[scope] = name
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise DeadlineExceeded("The question, or its answer, was lost.", received=name) from error
        finally:
            self._heard.forget(scope)
            self._names.pop(scope, None)

    def observe(self, state: ServiceState, now: float) -> None:
        """Take in telemetry: the questions that an instance has."""
        if state.service is not ServiceName.PREPOST:
            return
        for scope, name in self._names.items():
            if name in (state.answering or ()):
                self._heard.hear(scope, now)

    def look(self, now: float) -> None:
        """End the waiting for answers that will not come.

        Without a connection no instance is heard, and an instance of an older version does not tell its questions.
        """
        prepost = (state for state in self._fleet.all() if state.service is ServiceName.PREPOST)
        if not self._connected() or any(state.answering is None for state in prepost):
            self._heard.listen(now)
        for scope in self._heard.silent(now):
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())
