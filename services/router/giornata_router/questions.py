"""What prepost was asked: a question that no living instance says to have is lost, with its instance or its message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from giornata.fleet import Fleet
from giornata.wire.errors import DeadlineExceeded
from giornata.wire.workers import ServiceName, ServiceState

LOST_S: Final = 3.0
"""As long as a worker may be silent about rows that it was given."""
TICK_S: Final = 0.25
"""How often is looked; a timer, since silence raises no event."""


@dataclass(eq=False)
class _Question:
    name: str
    scope: asyncio.Timeout
    had_s: float
    """When it was asked, or somebody last said to have it."""


class Questions:
    """The open questions to prepost.

    Args:
        connected: whether one could hear.
    """

    def __init__(self, connected: Callable[[], bool] = lambda: True) -> None:
        self._connected = connected
        self._fleet = Fleet()
        self._open: set[_Question] = set()

    @asynccontextmanager
    async def asked(self, name: str) -> AsyncIterator[None]:
        """Ask and wait for the answer inside.

        Raises:
            DeadlineExceeded: nobody has the question, so that no answer will come.
        """
        scope = asyncio.timeout(None)
        question = _Question(name, scope, time.monotonic())
        try:
            async with scope:
                self._open.add(question)
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise DeadlineExceeded("The question, or its answer, was lost.", received=name) from error
        finally:
            self._open.discard(question)

    def observe(self, state: ServiceState, now: float) -> None:
        """Telemetry: what an instance has."""
        if state.service is not ServiceName.PREPOST:
            return
        self._fleet.observe(state, now)
        for question in self._open:
            if question.name in (state.answering or ()):
                question.had_s = now

    def look(self, now: float) -> None:
        """End the waiting for answers that will not come.

        Without a connection nothing is heard of anybody, and of an instance of an older version nothing is known.
        """
        self._fleet.expire(now)
        if not self._connected() or any(state.answering is None for state in self._fleet.all()):
            for question in self._open:
                question.had_s = now
        for question in self._open:
            if now - question.had_s > LOST_S and not question.scope.expired():
                question.scope.reschedule(asyncio.get_running_loop().time())

    async def watch(self) -> None:
        """Look again and again; runs for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            self.look(time.monotonic())
