"""What each kind of fault does to a stack: signals to processes, the network, the stores' room, the clocks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import redis.asyncio
from nats.js import JetStreamContext

from giornata.retries import COMING_UP_S, ask_jetstream
from giornata.wire import subjects
from giornata.wire.workers import ServiceName
from giornata_lab.rehearsals.chaos.plan import Fault, Kind, Server
from giornata_lab.rehearsals.chaos.relay import Direction, RelayNetwork
from giornata_tools.launcher.process import StackProcess
from giornata_tools.launcher.stack import Stack

ENDS_S: Final = 60.0
"""Longest that a process may take to end after SIGTERM; then it is killed, and has not drained."""
HEADROOM_BYTES: Final = 256 << 10
FILLED: Final = 0.95
"""How full a store is at once: beyond what a door accepts, and running jobs can still end."""
CLOCK: Final = Path(__file__).with_name("clock")
"""Folder of what services import at their start."""
_DIRECTIONS: Final = {Kind.DEAF: Direction.IN, Kind.MUTE: Direction.OUT}


class Clocks:
    """The wall clocks of the services, by a file each in `folder`; monotonic clocks stay."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ahead_s = dict.fromkeys(ServiceName, 0)
        folder.mkdir(parents=True, exist_ok=True)
        for service in ServiceName:
            self._write(service)

    def env(self, service: ServiceName) -> Mapping[str, str]:
        """The environment in which a service's clock can jump."""
        path = os.pathsep.join(filter(None, (str(CLOCK), os.environ.get("PYTHONPATH"))))
        return {"PYTHONPATH": path, "CHAOS_CLOCK": str(self._file(service))}

    def put_forward(self, service: ServiceName, seconds: int) -> None:
        """Let the clock of a service jump, by less than 0 for back."""
        self._ahead_s[service] += seconds
        self._write(service)

    def _write(self, service: ServiceName) -> None:
        draft = self._file(service).with_suffix(".new")
        draft.write_text(str(self._ahead_s[service]))
        draft.replace(self._file(service))

    def _file(self, service: ServiceName) -> Path:
        return self._folder / service


class Faults:
    """Inflicts one fault at a time on `stack`.

    Args:
        stack: is disturbed.
        jetstream: of a user that may change streams.
        network: between the services and NATS.
        clocks: of the services.
    """

    def __init__(
        self, stack: Stack, jetstream: JetStreamContext, network: RelayNetwork, clocks: Clocks
    ) -> None:
        self._stack, self._jetstream = stack, jetstream
        self._network, self._clocks = network, clocks

    async def inflict(self, fault: Fault, victims: Sequence[str]) -> list[int]:
        """Do it, and return when it is over: exit statuses of the victims that have ended."""
        match fault.kind:
            case Kind.KILL | Kind.RESTART:
                return await self._end(fault.kind, victims)
            case Kind.FREEZE:
                await self._freeze(victims, fault.lasts_s)
            case Kind.DEAF | Kind.MUTE:
                await self._cut_off(victims, _DIRECTIONS[fault.kind], fault.lasts_s)
            case Kind.SLOW:
                await self._slow_down(fault)
            case Kind.FULL:
                async with self._full(fault.target):
                    await asyncio.sleep(fault.lasts_s)
            case Kind.CLOCK:
                assert isinstance(fault.target, ServiceName)
                self._clocks.put_forward(fault.target, fault.jump_s)
        return []

    async def _end(self, kind: Kind, victims: Sequence[str]) -> list[int]:
        processes = [self._stack.process(name) for name in victims]
        number = signal.SIGKILL if kind is Kind.KILL else signal.SIGTERM
        try:
            async with asyncio.timeout(ENDS_S):
                return await _ended(processes, number)
        except TimeoutError:
            return await _ended(processes, signal.SIGKILL)

    async def _freeze(self, victims: Sequence[str], lasts_s: float) -> None:
        processes = [self._stack.process(name) for name in victims]
        try:
            for process in processes:
                process.freeze()
            await asyncio.sleep(lasts_s)
        finally:
            for process in processes:
                process.thaw()

    async def _cut_off(self, victims: Sequence[str], direction: Direction, lasts_s: float) -> None:
        try:
            for name in victims:
                self._network.hold(name, direction)
            await asyncio.sleep(lasts_s)
        finally:
            for name in victims:
                self._network.release(name, direction)

    async def _slow_down(self, fault: Fault) -> None:
        self._network.delay_s = fault.delay_s
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            self._network.delay_s = 0.0

    @asynccontextmanager
    async def _full(self, target: object) -> AsyncIterator[None]:
        """A store that is nearly full and takes nothing more from new jobs, while inside."""
        if target is Server.NATS:
            found = await self._limit_records(None)
            try:
                yield
            finally:
                await self._limit_records(found)
            return
        async with redis.asyncio.from_url(self._stack.blobs_url) as client:
            info: dict[str, Any] = await client.info("memory")
            used, most = int(info["used_memory"]), int(info["maxmemory"])
            await client.config_set("maxmemory", used + HEADROOM_BYTES)
            try:
                yield
            finally:
                await client.config_set("maxmemory", most)

    async def _limit_records(self, limit: int | None) -> int:
        """Set the limit of the bucket of job records, None: little more than it holds; return the limit before."""
        name = subjects.bucket_stream(subjects.RECORDS)
        info = await ask_jetstream(lambda: self._jetstream.stream_info(name), COMING_UP_S)
        if limit is None:
            used = info.state.bytes
            limit = max(int(used / FILLED), used + HEADROOM_BYTES)
        changed = info.config.evolve(max_bytes=limit)
        await ask_jetstream(lambda: self._jetstream.update_stream(changed), COMING_UP_S)
        return info.config.max_bytes or -1


async def _ended(processes: Sequence[StackProcess], number: signal.Signals) -> list[int]:
    """Exit statuses after a signal."""
    return await asyncio.gather(*(process.crash(number) for process in processes))
