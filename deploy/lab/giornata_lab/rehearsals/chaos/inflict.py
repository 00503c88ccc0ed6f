"""Carries out a plan of faults on a stack, and waits after each round until everything is whole again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from giornata.wire.workers import ServiceName, ServiceState
from giornata_lab.rehearsals.chaos.faults import Faults
from giornata_lab.rehearsals.chaos.load import Pace
from giornata_lab.rehearsals.chaos.look import ProcessUsage, usage
from giornata_lab.rehearsals.chaos.plan import AT_ONCE, Fault, FaultRound, Server
from giornata_tools.launcher.process import LaunchError
from giornata_tools.launcher.servers import NATS, VALKEY
from giornata_tools.launcher.stack import Stack

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
