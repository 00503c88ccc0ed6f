"""What telemetry says of the fleet, and a way to wait until it says something."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from giornata import retries
from giornata.bus import bus
from giornata.fleet import Fleet
from giornata.wire import subjects
from giornata.wire.permissions import NatsRole
from giornata.wire.workers import ServiceName, ServiceState
from giornata_tools.launcher.process import LaunchError


class TelemetryWatch:
    """The fleet as its telemetry draws it, while :meth:`listening`."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self._news = asyncio.Event()

    @asynccontextmanager
    async def listening(self, nats_url: str, password_file: Path | None) -> AsyncIterator[None]:
        """Hear all telemetry, as the user `observer`.

        `password_file` holds the observer's password; None where the address does, or none is asked for.

        Raises:
            ServiceUnavailable: no server answers.
            NotPermitted: the user that the address names may not hear it.
        """
        async with (
            bus.connect(
                nats_url, "launcher", user=NatsRole.OBSERVER, password_file=password_file
            ) as connected,
            connected.listen(subjects.ALL_TELEMETRY, ServiceState, self.hear),
        ):
            yield

    def hear(self, state: ServiceState) -> None:
        """Take in one telemetry message."""
        self.fleet.observe(state, time.monotonic())
        self.wake()

    def lose(self, instance: str) -> None:
        """Forget an instance whose process has ended."""
        self.fleet.forget(instance)
        self.wake()

    def wake(self) -> None:
        """Have every waiting task look again."""
        self._news.set()
        self._news = asyncio.Event()

    async def until(
        self, condition: Callable[[Fleet], bool], limit_s: float, unmet: Callable[[Fleet], str]
    ) -> None:
        """Wait until `condition` holds; it is asked again at every news, and may raise to end the waiting.

        `unmet` says in a sentence what is still missing.

        Raises:
            LaunchError: `condition` does not hold within `limit_s`.
        """
        try:
            async with asyncio.timeout(limit_s):
                while not condition(self._living()):
                    await self._news.wait()
        except TimeoutError:
            raise LaunchError(f"After {limit_s:g} s: {unmet(self._living())}") from None

    def _living(self) -> Fleet:
        self.fleet.expire(time.monotonic())
        return self.fleet


def missing(fleet: Fleet, expected: Mapping[str, ServiceName]) -> list[str]:
    """Instances of `expected` that are not *ready* (a standby router is), and services without one that takes work."""
    states = {name: fleet.get(name) for name in expected}
    waiting = [name for name, state in states.items() if state is None or not state.ready or state.draining]
    others = set(expected.values()) - {expected[name] for name in waiting}
    return waiting + [f"a {service} that takes work" for service in fleet.missing(sorted(others))]


async def answers_200(url: str, limit_s: float) -> None:
    """Ask until `url` answers 200: a gateway knows the fleet from the same telemetry as we, a moment later.

    Raises:
        LaunchError: it does not within `limit_s`.
    """
    try:
        async with aiohttp.ClientSession(raise_for_status=True) as session:

            async def ask() -> None:
                await session.get(url)

            await retries.polling(aiohttp.ClientError, limit_s)(ask)
    except aiohttp.ClientError as error:
        raise LaunchError(f"{url} does not answer 200 within {limit_s:g} s: {error}.") from error
