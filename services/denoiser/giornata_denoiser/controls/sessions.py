"""Instances of the ControlNet service, and the rows that are open there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import structlog
import torch

from giornata.bus.bus import Bus
from giornata.bus.connection import keep_looking
from giornata.control.layout import Behind, count_sequences, sum_residuals
from giornata.control.link import ControlFailed, LinkLost
from giornata.control.link.client import ControlLink
from giornata.deadlines import Deadline
from giornata.fleet import Fleet, ListeningClock
from giornata.scheduling.batch import RowKey
from giornata.wire import subjects
from giornata.wire.controlnets import (
    ALIGNMENT_BYTES,
    CloseControl,
    CloseControlReply,
    ControlBase,
    ControlState,
    DataPath,
    OpenControl,
    OpenControlReply,
    StepRefusal,
    control_row,
)
from giornata.wire.errors import (
    ControlNetNotFound,
    ControlNetUnavailable,
    DeadlineExceeded,
    GiornataError,
    NotSupported,
)
from giornata.wire.messages import RunRequest
from giornata.wire.values import CellMap
from giornata.wire.workers import ServiceName, ServiceState
from giornata_denoiser.controls.residuals import ControlLinkAddress, ControlNetSession, OpenControls
from giornata_denoiser.rows.row import Row

OPENING_MS: Final = 15_000
"""How long an instance may take to open a row: it may have to load weights."""
TOLD_S: Final = 5.0
"""Within this time every instance that is alive tells of itself."""
CLOSE_MS: Final = 1_000
MOST_LOSSES: Final = 5
"""A row that has been lost so often fails."""
STEPS: Final = 2
"""For so many of its steps a row has room on the data path: a place that is free lies between others."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ControlClientInfo:
    """The denoiser that asks."""

    base: ControlBase
    denoiser: str
    host: str
    """See :attr:`giornata.wire.controlnets.OpenControl.host`."""
    paths: tuple[DataPath, ...]
    """What it can use, the best one first."""
    dtype: torch.dtype
    """The dtype of latents and samples."""


def room_bytes(asking: ControlClientInfo, row: Row, behind: Sequence[Behind]) -> int:
    """Bytes that a row takes of a data path; `behind` is by ControlNet."""
    base = asking.base
    sums = sum_residuals(behind)
    channels = sum(base.channels[block] for block in sums.first)
    tokens = count_sequences(base.kind, len(row.inputs.prompts)) * row.image_tokens
    places = len(sums.parts) + 1
    step = (tokens * channels + row.latent.numel()) * asking.dtype.itemsize + places * ALIGNMENT_BYTES
    return STEPS * step


def control_of(state: ServiceState) -> ControlState:
    """What an instance of the ControlNet service tells of itself."""
    if state.control is None:
        raise ValueError(f"{state.instance} is no ControlNet instance")
    return state.control


def able_instances(
    states: Iterable[ServiceState], digests: Collection[str], excluded: Collection[str] = ()
) -> list[ServiceState]:
    """The instances that take another row with these ControlNets."""
    return [
        state
        for state in states
        if state.control is not None
        and state.instance not in excluded
        and state.control.rows < state.control.capacity_rows
        and {card.digest for card in state.controlnets}.issuperset(digests)
    ]


def best_instance(states: Iterable[ServiceState], digests: Collection[str], host: str) -> ServiceState | None:
    """The instance to open a row at: of this host, with weights that are there already, with the least to do."""

    def rank(state: ServiceState) -> tuple[bool, int, float, int, str]:
        told = control_of(state)
        lacking = len(set(digests) - set(told.resident))
        return told.machine != host, lacking, told.pending_ms, told.rows, state.instance

    return min(states, key=rank, default=None)


class ControlNetInstances:
    """The living instances, as their telemetry reports them. Everything is of one event loop."""

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
        """Return whether one that is alive has these ControlNets, whether it takes rows now or not."""
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
        async with bus.listen(told, ServiceState, self.hear) as listening, asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(keep_looking(listening, self._clock, self._look), name="instances")
            try:
                yield
            finally:
                looking.cancel()

    def hear(self, state: ServiceState) -> None:
        """Take in what an instance tells."""
        self._fleet.observe(state, self._clock.listened_s)
        self._news.set()

    def _look(self) -> None:
        for state in self._fleet.expire(self._clock.listened_s):
            log.warning("controlnet_silent", instance=state.instance)
            self.on_gone(state.instance)
            self._news.set()


class ControlDataPath:
    """A link, and how much of its memory rows may still take. Everything is of one event loop."""

    def __init__(self, link: ControlLink | ControlLinkAddress, size_bytes: int) -> None:
        self.link: Any = link
        self.size_bytes = size_bytes
        self.free_bytes = size_bytes
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
                accepted=f"{self.size_bytes >> 20} MiB",
            )
        while self.free_bytes < wanted_bytes:
            self._changed.clear()
            await self._changed.wait()
        self.free_bytes -= wanted_bytes

    def give_back(self, taken_bytes: int) -> None:
        """Let others have it."""
        self.free_bytes += taken_bytes
        self._changed.set()


class DataPathPool:
    """One data path to each instance that has rows of this denoiser, made when the first row is open there.

    A row that leaves while its path is made leaves it to others; :meth:`close` ends all. Without a device nothing is
    connected: these are the paths of a pool's leader.
    """

    def __init__(self, slab_bytes: int, device: torch.device | None) -> None:
        self._slab_bytes, self._device = slab_bytes, device
        self._paths: dict[tuple[str, str], asyncio.Task[ControlDataPath]] = {}
        """By instance and address."""

    @property
    def made(self) -> list[ControlDataPath]:
        """The paths that could be made."""
        ended = (making for making in self._paths.values() if making.done() and not making.exception())
        return [making.result() for making in ended]

    async def to(self, instance: str, opened: OpenControlReply) -> ControlDataPath:
        """The data path over which the row that is `opened` can be asked for.

        Raises:
            LinkLost: the instance cannot be reached so.
        """
        key = instance, opened.address
        over = [each for each in self._paths if each[0] == instance and _is_over(self._paths[each])]
        ended = [self._paths.pop(each) for each in over]
        making = self._paths.get(key)
        if making is None:
            making = self._paths[key] = asyncio.create_task(self._made(instance, opened, ended), name="link")
            making.add_done_callback(lambda task: task.cancelled() or task.exception())  # others may not wait
        else:
            await _close(ended)
        return await asyncio.shield(making)

    async def leave(self, instance: str) -> None:
        """Close the links to an instance that is gone."""
        await _close([self._paths.pop(key) for key in list(self._paths) if key[0] == instance])

    async def close(self) -> None:
        """Close all links: whoever waits for a sample is told that it is lost."""
        await _close([self._paths.pop(key) for key in list(self._paths)])

    async def _made(
        self, instance: str, opened: OpenControlReply, ended: Collection[asyncio.Task[ControlDataPath]]
    ) -> ControlDataPath:
        await _close(ended)
        link = await asyncio.to_thread(self._link, opened)
        log.info("controlnet_linked", instance=instance, path=opened.path)
        return ControlDataPath(link, self._slab_bytes)

    def _link(self, opened: OpenControlReply) -> ControlLink | ControlLinkAddress:
        address = ControlLinkAddress(opened.path, opened.address, opened.token, self._slab_bytes)
        if self._device is None:
            return address
        try:
            return address.open(self._device)
        except (OSError, RuntimeError) as error:  # torch tells of memory that is not to be had by the latter
            raise LinkLost(f"no data path over {opened.path} to {opened.address}: {error}") from error


def _is_over(making: asyncio.Task[ControlDataPath]) -> bool:
    """Return whether a path could not be made, or is lost: an instance that has been started again has another."""
    return making.done() and (making.exception() is not None or making.result().link.lost)


async def _close(making: Collection[asyncio.Task[ControlDataPath]]) -> None:
    """Close paths, once they are made."""
    if making:
        await asyncio.wait(making)
    links = [task.result().link for task in making if task.exception() is None]
    await asyncio.gather(*(asyncio.to_thread(link.close) for link in links))


class ControlNetSessionManager:
    """Keeps rows open. Everything but :meth:`lost` is of one event loop.

    A row waits for `open_s` seconds for an instance that takes it. `resume` is told of an attempt, job and number,
    whose rows can go on. Instances are told of rows that have ended by `tasks`.
    """

    def __init__(
        self,
        bus: Bus,
        instances: ControlNetInstances,
        links: DataPathPool,
        asking: ControlClientInfo,
        *,
        open_s: float,
        resume: Callable[[str, int], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.open_s = open_s
        """How long a row may wait for an instance."""
        self._tasks = tasks
        self._bus, self._instances, self._links, self._asking = bus, instances, links, asking
        self._resume = resume
        self._loop = asyncio.get_running_loop()
        self._losses: dict[RowKey, asyncio.Queue[Exception]] = {}
        self._closing: dict[tuple[RowKey, str], asyncio.Task[None]] = {}
        """Rows that an instance is being told to close."""
        self.opened: OpenControls[Any]
        """Set by the owner: it tells :meth:`lost`."""

    def lost(self, key: RowKey, reason: Exception) -> None:
        """A row's instance does not compute it any longer; may be called in any thread."""
        self._loop.call_soon_threadsafe(self._take_loss, key, reason)

    @asynccontextmanager
    async def held(
        self, request: RunRequest, rows: Sequence[Row], *, fall_back: bool
    ) -> AsyncIterator[asyncio.Future[None]]:
        """Keep `rows` open within the context. The future has the error of a row that cannot be, and never ends else.

        Rows that `fall_back` are computed in this process until they are open, and where no instance is left.
        """
        failed: asyncio.Future[None] = self._loop.create_future()
        kept = [
            asyncio.create_task(self._keep(request, row, failed, fall_back=fall_back), name="open")
            for row in rows
        ]
        try:
            yield failed
        finally:
            for task in kept:
                task.cancel()
            ended = await asyncio.gather(*kept, return_exceptions=True)
            if not failed.cancel() and not failed.cancelled():
                failed.exception()  # the attempt may have ended before it was told
            for error in ended:
                if isinstance(error, Exception):  # unexpected: what is expected has been told
                    log.error("controlnet_row_failed", exc_info=error)

    async def _keep(
        self, request: RunRequest, row: Row, failed: asyncio.Future[None], *, fall_back: bool
    ) -> None:
        try:
            error = await self._kept(request, row)
        except Exception as unforeseen:  # noqa: BLE001 - the row's edge: its attempt is told
            error = unforeseen
        if fall_back:
            log.warning("controlnet_local", key=row.key, error=str(error))
            self._resume(row.key.job_id, row.key.attempt)
        elif not failed.done():
            failed.set_exception(error)

    async def _kept(self, request: RunRequest, row: Row) -> Exception:
        """Keep the row open, until it has been lost too often: what that means."""
        losses = self._losses[row.key] = asyncio.Queue()
        excluded: set[str] = set()
        reasons: list[str] = []
        try:
            while len(reasons) < MOST_LOSSES:
                session, path = await self._opened(request, row, excluded, lost=bool(reasons))
                reason = await self._asked_there(row, session, path, losses)
                log.warning("controlnet_lost", key=row.key, instance=session.instance, reason=str(reason))
                reasons.append(str(reason))
                # One that was started again does not know the row, and can open it.
                if not (isinstance(reason, ControlFailed) and reason.code == StepRefusal.ROW_UNKNOWN):
                    excluded.add(session.instance)
        finally:
            del self._losses[row.key]
        return ControlNetUnavailable("The row was lost at its ControlNet instances.", received=reasons[-1])

    async def _asked_there(
        self,
        row: Row,
        session: ControlNetSession[Any],
        path: ControlDataPath,
        losses: asyncio.Queue[Exception],
    ) -> Exception:
        """Let the engine ask for the row at an instance, until it is lost there: why it is."""
        taken = room_bytes(self._asking, row, session.behind)
        try:
            await path.take(taken)
            try:
                self.opened.put(row.key, session)
                self._resume(row.key.job_id, row.key.attempt)
                return await losses.get()
            finally:
                self.opened.drop(row.key)
                path.give_back(taken)
        finally:
            self._begin_close(row.key, session.instance)

    async def _opened(
        self, request: RunRequest, row: Row, excluded: set[str], *, lost: bool
    ) -> tuple[ControlNetSession[Any], ControlDataPath]:
        """The row at an instance that is not excluded; after a while, at any.

        One that was `lost` has been open: its ControlNets exist, though nobody may tell of them now.

        Raises:
            ControlNetUnavailable: no instance takes it in time.
            GiornataError: an instance says that no instance can.
        """
        digests = {use.digest for use in row.adapters.controls}
        last: GiornataError = ControlNetUnavailable(
            received=", ".join(use.model for use in row.adapters.controls)
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(self.open_s):
                if not lost:
                    await self._offered(row, digests)
                while True:
                    states = able_instances(self._instances.states, digests, excluded)
                    found = best_instance(states, digests, self._asking.host)
                    if found is None:
                        excluded.clear()
                        await self._instances.news()
                        continue
                    try:
                        return await self._open_at(found, request, row)
                    except LinkLost as error:
                        last = ControlNetUnavailable(received=str(error))
                    except GiornataError as error:
                        if not error.retryable:
                            raise
                        last = error
                    excluded.add(found.instance)
        raise last

    async def _offered(self, row: Row, digests: Collection[str]) -> None:
        """Wait for an instance that has these ControlNets; not for long, since those that are alive have told.

        Raises:
            ControlNetNotFound: none has.
        """
        try:
            async with asyncio.timeout(TOLD_S):
                while not self._instances.offer(digests):
                    await self._instances.news()
        except TimeoutError:
            models = ", ".join(use.model for use in row.adapters.controls)
            raise ControlNetNotFound(field="controlnets", received=models) from None

    async def _open_at(
        self, state: ServiceState, request: RunRequest, row: Row
    ) -> tuple[ControlNetSession[Any], ControlDataPath]:
        """The row at this instance; by its next best data path where one cannot be had after all.

        Raises:
            LinkLost: it cannot be reached, or leaves.
            GiornataError: it does not take the row.
        """
        if (closing := self._closing.get((row.key, state.instance))) is not None:
            await asyncio.wait([closing])  # what comes later closes the row that is opened now
        paths = self._asking.paths
        try:
            while True:
                opened = await self._asked(state, request, row, paths)
                paths = paths[paths.index(opened.path) + 1 :]
                try:
                    path = await self._links.to(state.instance, opened)
                except LinkLost as error:
                    if not paths:
                        raise
                    log.warning(
                        "controlnet_path_refused", instance=state.instance, reason=str(error), next=paths[0]
                    )
                else:
                    break
        except (LinkLost, GiornataError, asyncio.CancelledError) as error:
            if paths != self._asking.paths or not isinstance(error, GiornataError):  # it may be open there
                self._begin_close(row.key, state.instance)
            raise
        session = ControlNetSession(state.instance, path.link, control_row(*_named(row.key)), opened.behind)
        return session, path

    async def _asked(
        self, state: ServiceState, request: RunRequest, row: Row, paths: tuple[DataPath, ...]
    ) -> OpenControlReply:
        remaining_ms = min(request.remaining_ms, OPENING_MS)
        asking, (height, width) = self._asking, row.grid
        computed = None
        if row.region is not None:
            cells = np.zeros(height * width, dtype=bool)
            cells[row.region.computed.cpu().numpy()] = True
            computed = CellMap(height=height, width=width, bits=np.packbits(cells).tobytes())
        asked = OpenControl(
            job=request.job,
            attempt=request.attempt,
            index=row.key.index,
            inspection=request.inspection,
            encoding=request.encoding,
            base=asking.base,
            grid=row.grid,
            times=tuple(row.track.times.tolist()),
            sequences=len(row.inputs.prompts),
            acting=tuple((use.first_step, use.end_step) for use in row.adapters.controls),
            computed=computed,
            denoiser=asking.denoiser,
            host=asking.host,
            paths=paths,
            remaining_ms=remaining_ms,
        )
        subject = subjects.controlnet(state.instance, "open")
        call = self._bus.call(subject, asked, OpenControlReply, Deadline.after_ms(remaining_ms))
        opening = asyncio.create_task(call, name="opening")
        left = asyncio.create_task(self._instances.left(state.instance), name="left")
        try:
            await asyncio.wait({opening, left}, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                return opening.result()
        except DeadlineExceeded as error:
            raise LinkLost(f"the ControlNet instance {state.instance} does not answer") from error
        finally:
            opening.cancel()
            left.cancel()
            await asyncio.wait({opening, left})
        raise LinkLost(f"the ControlNet instance {state.instance} has left")

    def _begin_close(self, key: RowKey, instance: str) -> None:
        """Tell an instance that a row has ended, without waiting for it."""
        closing = self._tasks.create_task(self._close(key, instance), name="close")
        self._closing[key, instance] = closing
        closing.add_done_callback(lambda _: self._closing.pop((key, instance), None))

    async def _close(self, key: RowKey, instance: str) -> None:
        job_id, attempt, index = _named(key)
        asked = CloseControl(job_id=job_id, attempt=attempt, index=index, remaining_ms=CLOSE_MS)
        try:
            subject = subjects.controlnet(instance, "close")
            await self._bus.call(subject, asked, CloseControlReply, Deadline.after_ms(CLOSE_MS))
        except GiornataError as error:  # it forgets rows that make no steps
            log.info("controlnet_not_closed", key=key, instance=instance, error=str(error))

    def _take_loss(self, key: RowKey, reason: Exception) -> None:
        if (losses := self._losses.get(key)) is not None:
            losses.put_nowait(reason)


def _named(key: RowKey) -> tuple[str, int, int]:
    return key.job_id, key.attempt, key.index
