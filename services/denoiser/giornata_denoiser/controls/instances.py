"""The instances of the ControlNet service that are alive, and the data paths to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager

import structlog
import torch

from giornata.bus.bus import Bus
from giornata.bus.listening import keep_looking
from giornata.control.link.client import ControlLink
from giornata.control.link.losses import LinkLost
from giornata.fleet import Fleet, ListeningClock
from giornata.wire import subjects
from giornata.wire.controlnets import OpenControlReply
from giornata.wire.errors import NotSupported
from giornata.wire.workers import ServiceName, ServiceState

log = structlog.get_logger(__name__)


class ControlNetInstances:
    """What telemetry tells of them. Everything is of one event loop."""

    def __init__(self) -> None:
        self._fleet, self._clock = Fleet(), ListeningClock()
        self._news = asyncio.Event()
        self.on_gone: Callable[[str], None] = lambda _: None
        """Told of each instance that is silent or has left."""

    @property
    def states(self) -> list[ServiceState]:
        """The instances that take rows now."""
        return self._fleet.ready(ServiceName.CONTROLNET)

    def offer(self, digests: Collection[str]) -> bool:
        """Whether one that is alive has these ControlNets, whether it takes rows now or not."""
        return any({card.digest for card in s.controlnets}.issuperset(digests) for s in self._fleet.all())

    async def left(self, instance: str) -> None:
        """Wait until an instance is silent or takes no more rows."""
        while any(state.instance == instance for state in self.states):
            await self.news()

    async def news(self) -> None:
        """Wait until one of them tells something, or is gone."""
        self._news.clear()
        await self._news.wait()

    @asynccontextmanager
    async def heard(self, bus: Bus) -> AsyncIterator[None]:
        """Listen to their telemetry within the context."""
        told = subjects.telemetry_of(ServiceName.CONTROLNET)
        async with bus.listen(told, ServiceState, self._hear) as listening, asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(keep_looking(listening, self._clock, self._look), name="instances")
            try:
                yield
            finally:
                looking.cancel()

    def _hear(self, state: ServiceState) -> None:
        self._fleet.observe(state, self._clock.listened_s)
        self._news.set()

    def _look(self) -> None:
        for state in self._fleet.expire(self._clock.listened_s):
            log.warning("controlnet_silent", instance=state.instance)
            self.on_gone(state.instance)
            self._news.set()


class ControlDataPath:
    """A link, and how much of its memory rows may still take. Everything is of one event loop."""

    def __init__(self, link: ControlLink, size_bytes: int) -> None:
        self.link, self.size_bytes = link, size_bytes
        self._free = size_bytes
        self._changed = asyncio.Event()

    async def take(self, wanted_bytes: int) -> None:
        """Wait until so much is free, and take it.

        Raises:
            NotSupported: it never is.
        """
        if wanted_bytes > self.size_bytes:
            raise NotSupported(
                "The ControlNets of a picture of this size take more memory than a denoiser's data path has.",
                field="controlnets",
                received=f"{wanted_bytes >> 20} MiB",
                accepted=f"{self.size_bytes >> 20} MiB (GIORNATA_CONTROL_SLAB_MB)",
            )
        while self._free < wanted_bytes:
            self._changed.clear()
            await self._changed.wait()
        self._free -= wanted_bytes

    def give_back(self, taken_bytes: int) -> None:
        """Let others have it."""
        self._free += taken_bytes
        self._changed.set()


class DataPathPool:
    """One data path to each instance that has rows of this denoiser, made when the first row is open there.

    A row that leaves while its path is made leaves it to others; :meth:`close` ends all.
    """

    def __init__(self, slab_bytes: int, device: torch.device) -> None:
        self._slab_bytes, self._device = slab_bytes, device
        self._paths: dict[tuple[str, str], asyncio.Task[ControlDataPath]] = {}
        """By instance and address."""

    async def to(self, instance: str, opened: OpenControlReply) -> ControlDataPath:
        """The data path over which the row that is `opened` can be asked for.

        Raises:
            LinkLost: the instance cannot be reached so.
        """
        key = instance, opened.address
        over = self._taken([each for each in self._paths if each[0] == instance and self._is_over(each)])
        making = self._paths.get(key)
        if making is None:
            making = self._paths[key] = asyncio.create_task(self._made(instance, opened, over), name="link")
            making.add_done_callback(_noted)
        else:
            await self._end(over)
        return await asyncio.shield(making)

    async def leave(self, instance: str) -> None:
        """Close the links to an instance that is gone."""
        await self._end(self._taken([key for key in self._paths if key[0] == instance]))

    async def close(self) -> None:
        """Close all links: whoever waits for a sample is told that it is lost."""
        await self._end(self._taken(list(self._paths)))

    def _is_over(self, key: tuple[str, str]) -> bool:
        """Whether a path could not be made, or is lost: an instance that has been started again has another."""
        making = self._paths[key]
        return making.done() and (making.exception() is not None or making.result().link.lost)

    def _taken(self, keys: Iterable[tuple[str, str]]) -> list[asyncio.Task[ControlDataPath]]:
        return [self._paths.pop(key) for key in keys]

    async def _made(
        self, instance: str, opened: OpenControlReply, over: Collection[asyncio.Task[ControlDataPath]]
    ) -> ControlDataPath:
        await self._end(over)
        link = await asyncio.to_thread(self._link, opened)
        log.info("controlnet_linked", instance=instance, path=opened.path)
        return ControlDataPath(link, self._slab_bytes)

    async def _end(self, making: Collection[asyncio.Task[ControlDataPath]]) -> None:
        """Close paths, once they are made."""
        if making:
            await asyncio.wait(making)
        links = [task.result().link for task in making if task.exception() is None]
        await asyncio.gather(*(asyncio.to_thread(link.close) for link in links))

    def _link(self, opened: OpenControlReply) -> ControlLink:
        try:
            return ControlLink(
                opened.path, opened.address, opened.token, slab_bytes=self._slab_bytes, device=self._device
            )
        except (OSError, RuntimeError) as error:  # torch tells of memory that is not to be had by the latter
            raise LinkLost(f"no data path over {opened.path} to {opened.address}: {error}") from error


def _noted(making: asyncio.Task[ControlDataPath]) -> None:
    """Whoever waits for it is told; there may be nobody."""
    if not making.cancelled():
        making.exception()
