"""What each kind of fault does to a stack: signals to processes, the network, the stores' room, the clocks."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import redis.asyncio
from nats.js import JetStreamContext

from giornata.retries import COMING_UP_S, ask_jetstream
from giornata.wire import subjects
from giornata.wire.workers import ServiceName, ServiceState
from giornata_lab.rehearsals.chaos.load import Pace
from giornata_lab.rehearsals.chaos.look import ProcessUsage, usage
from giornata_lab.rehearsals.chaos.plan import AT_ONCE, Fault, FaultRound, Kind, Server
from giornata_lab.rehearsals.chaos.relay import Direction, RelayNetwork
from giornata_tools.launcher.process import LaunchError, StackProcess
from giornata_tools.launcher.servers import NATS, VALKEY
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


WHOLE_S: Final = 180.0
"""Longest that a stack may take to be whole again; loading models on a busy machine takes its time."""


@dataclass
class Inflicted:
    """A fault that has come, and what followed."""

    fault: Fault
    victims: list[str]
    in_progress: int
    """Edits at that moment."""
    statuses: list[int] = field(default_factory=list)
    """Exit statuses of the victims, -N for signal N."""
    over_s: float = 0.0
    """When the victims had ended, or went on, by the monotonic clock."""
    recovery_s: float | None = None
    """From then until the stack was whole, of what came at the same moment too."""

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": self.fault.kind,
            "target": self.fault.target,
            "victims": self.victims,
            "in_progress": self.in_progress,
            "lasts_s": round(self.fault.lasts_s, 2),
            "statuses": self.statuses,
            "recovery_s": None if self.recovery_s is None else round(self.recovery_s, 2),
        }


class Chaos:
    """Inflicts `faults` on `stack`, in step with the load's `pace`."""

    def __init__(self, stack: Stack, faults: Faults, pace: Pace) -> None:
        self._stack, self._faults = stack, faults
        self._pace = pace
        self._servers = len(stack.servers)
        self.inflicted: list[Inflicted] = []
        self.usage: dict[int, list[ProcessUsage]] = {}
        """What processes took whenever the stack was whole, by process id."""
        self.broken: str | None = None
        """Why the stack has not become whole again."""

    async def carry_out(self, rounds: Sequence[FaultRound], edits: int) -> None:
        """Every round when its edits have been begun; then so many more as leave some for the next one."""
        afters = [*(one.after for one in rounds), edits]
        self.measure()
        for turn, following in zip(rounds, afters[1:], strict=True):
            await self._pace.allow(turn.after)
            await self._pace.reached(turn.after, turn.in_progress)
            found = [self._choose(fault) for fault in turn.faults]
            self.inflicted += found
            await self._pace.allow(following - AT_ONCE)  # the others are for the moment of the next fault
            await asyncio.gather(*map(self._inflict, found))
            try:
                await self._stack.wait_whole(self._servers, WHOLE_S)
            except LaunchError as error:
                self.broken = str(error)
                break
            for one in found:
                one.recovery_s = time.monotonic() - one.over_s
            self.measure()
        await self._pace.allow(edits)

    def measure(self) -> None:
        """Note what every process takes now."""
        for one in usage({name: self._stack.process(name).pid for name in self._stack.names}):
            self.usage.setdefault(one.pid, []).append(one)

    def _choose(self, fault: Fault) -> Inflicted:
        target = fault.target
        if isinstance(target, Server):
            prefix = NATS if target is Server.NATS else VALKEY
            names = [name for name in self._stack.servers if name.startswith(prefix)]
        else:
            names = sorted(self._stack.instances(target), key=self._at_work, reverse=True)
        victims = names if fault.everyone else [names[int(fault.pick * len(names))]]
        return Inflicted(fault, victims, self._pace.in_progress)

    def _at_work(self, instance: str) -> bool:
        """Return whether it is the active router, or a denoiser with rows."""
        state: ServiceState | None = self._stack.watch.fleet.get(instance)
        return (
            state is not None
            and (state.service is ServiceName.ROUTER or bool(state.worker))
            and (bool(state.worker.running) if state.worker else state.active)
        )

    async def _inflict(self, one: Inflicted) -> None:
        one.statuses = await self._faults.inflict(one.fault, one.victims)
        one.over_s = time.monotonic()
