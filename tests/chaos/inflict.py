"""Carries out a plan of faults on a stack, and waits after each round until everything is whole again."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from giornata.wire.workers import ServiceName, ServiceState
from giornata_tools.launcher.process import LaunchError, Process
from giornata_tools.launcher.servers import NATS, VALKEY
from giornata_tools.launcher.stack import Stack
from tests.chaos.load import Pace
from tests.chaos.look import Usage, usage
from tests.chaos.plan import AT_ONCE, Fault, Kind, Round, Server

WHOLE_S: Final = 180.0
"""Longest that a stack may take to be whole again; loading models on a busy machine takes its time."""
ENDS_S: Final = 60.0
"""Longest that a process may take to end after SIGTERM; then it is killed, and has not drained."""


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
    """Inflicts faults on `stack`, in step with the load's `pace`."""

    def __init__(self, stack: Stack, pace: Pace) -> None:
        self._stack = stack
        self._pace = pace
        self._servers = len(stack.servers)
        self.inflicted: list[Inflicted] = []
        self.usage: dict[int, list[Usage]] = {}
        """What processes took whenever the stack was whole, by process id."""
        self.broken: str | None = None
        """Why the stack has not become whole again."""

    async def carry_out(self, rounds: Sequence[Round], edits: int) -> None:
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
        for one in usage({name: self._stack.process(name).pid for name in self._names()}):
            self.usage.setdefault(one.pid, []).append(one)

    def _names(self) -> list[str]:
        return [
            *self._stack.servers,
            *(name for service in ServiceName for name in self._stack.instances(service)),
        ]

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
        """Whether it is the active router, or a denoiser with rows."""
        state: ServiceState | None = self._stack.watch.fleet.get(instance)
        return (
            state is not None
            and (state.service is ServiceName.ROUTER or bool(state.worker))
            and (bool(state.worker.running) if state.worker else state.active)
        )

    async def _inflict(self, one: Inflicted) -> None:
        await self._disturb(one)
        one.over_s = time.monotonic()

    async def _disturb(self, one: Inflicted) -> None:
        processes = [self._stack.process(name) for name in one.victims]
        if one.fault.kind is Kind.FREEZE:
            try:
                for process in processes:
                    process.freeze()
                await asyncio.sleep(one.fault.lasts_s)
            finally:
                for process in processes:
                    process.thaw()
            return
        number = signal.SIGKILL if one.fault.kind is Kind.KILL else signal.SIGTERM
        try:
            async with asyncio.timeout(ENDS_S):
                one.statuses = await _ended(processes, number)
        except TimeoutError:
            one.statuses = await _ended(processes, signal.SIGKILL)


async def _ended(processes: Sequence[Process], number: signal.Signals) -> list[int]:
    """Exit statuses after a signal."""
    return await asyncio.gather(*(process.crash(number) for process in processes))
