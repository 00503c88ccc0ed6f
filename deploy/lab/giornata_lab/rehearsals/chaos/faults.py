"""Which faults come, after how many edits, and what they do to the processes of a stack."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from giornata.deadlines import Deadline
from giornata.fleet import Fleet
from giornata.wire.workers import ServiceName, ServiceState
from giornata_lab.rehearsals.chaos.load import AT_ONCE, Pace
from giornata_lab.rehearsals.chaos.look import ProcessUsage, usage
from giornata_tools.launcher.plan import NATS, VALKEY
from giornata_tools.launcher.process import LaunchError, StackProcess
from giornata_tools.launcher.stack import Stack, answers_200
from giornata_tools.launcher.warden import signal_group


class Kind(StrEnum):
    """What happens to a process."""

    KILL = "kill"
    """SIGKILL, as a crash; a successor is started."""
    FREEZE = "freeze"
    """SIGSTOP to it and its children, SIGCONT after a while, as on a machine that stalls."""
    RESTART = "restart"
    """SIGTERM: it drains; a successor is started."""


class Server(StrEnum):
    """What is no service."""

    NATS = "nats"
    VALKEY = "valkey"


Target = ServiceName | Server
TARGETS: Final[tuple[Target, ...]] = (*ServiceName, *Server)

LASTS_S: Final[dict[Target, tuple[float, float]]] = {
    ServiceName.DENOISER: (5.0, 8.0),  # beyond its silence and its stall limit
    ServiceName.ROUTER: (2.0, 10.0),  # less and more than its lease
    Server.NATS: (1.0, 6.0),
}
"""Between which seconds a target is frozen, where not :data:`ANY_S`."""
ANY_S: Final = (0.5, 8.0)
WIRED: Final = (ServiceName.GATEWAY, ServiceName.ROUTER, ServiceName.DENOISER, ServiceName.PREPOST)
"""Services that every edit needs."""
LEAST: Final = 3
"""Edits that are in progress when a round comes, at least: so the others are hit at every stage."""
PAIR_SHARE: Final = 0.25
"""Share of rounds with two faults at once."""


@dataclass(frozen=True)
class Fault:
    """One fault of one target."""

    kind: Kind
    target: Target
    everyone: bool = False
    """All instances of the service at once, so that for a while there is none."""
    pick: float = 0.0
    """Which instance otherwise, 0..1: those that are at work come first."""
    lasts_s: float = 0.0
    """How long it is frozen."""


@dataclass(frozen=True)
class FaultRound:
    """Faults that come at the same moment. The next round waits until everything is whole again."""

    after: int
    """Edits that have been begun before."""
    in_progress: int
    """It comes when no more of them are left."""
    faults: tuple[Fault, ...]


_ESSENTIAL: Final[tuple[tuple[Kind, Target, bool], ...]] = (
    (Kind.KILL, Server.NATS, False),
    (Kind.KILL, Server.VALKEY, False),
    (Kind.FREEZE, ServiceName.DENOISER, False),
    (Kind.FREEZE, ServiceName.ROUTER, False),
    (Kind.KILL, ServiceName.GATEWAY, False),
    (Kind.KILL, ServiceName.ROUTER, False),
    (Kind.KILL, ServiceName.DENOISER, False),
    (Kind.KILL, ServiceName.PREPOST, False),
    (Kind.RESTART, ServiceName.ROUTER, False),
)
"""What every plan of nine faults has."""
_ALL: Final[tuple[tuple[Kind, Target, bool], ...]] = (
    *((kind, target, False) for kind in Kind for target in TARGETS),
    *((Kind.KILL, service, True) for service in WIRED),
)
ALL: Final = len(_ALL)
"""A plan of so many faults has every kind on every target that it can come to."""


def draw(seed: int, *, edits: int, faults: int) -> tuple[FaultRound, ...]:
    """Rounds of `faults` faults in all, spread over `edits` edits.

    Every kind comes to every target before one comes again; the essential ones come first of all, in any order.
    """
    chance = random.Random(seed)  # noqa: S311 - a plan, no secret
    drawn = _faults(chance)
    grouped: list[list[Fault]] = []
    for _ in range(faults):
        fault = next(drawn)
        beside = grouped[-1] if grouped else []
        if len(beside) == 1 and beside[0].target is not fault.target and chance.random() < PAIR_SHARE:
            beside.append(fault)
        else:
            grouped.append([fault])
    share = edits / (len(grouped) + 1)
    return tuple(
        FaultRound(int(share * (i + chance.uniform(0.5, 1.0))), chance.randint(LEAST, AT_ONCE), tuple(group))
        for i, group in enumerate(grouped)
    )


def _faults(chance: random.Random) -> Iterator[Fault]:
    """Deck after deck, each shuffled; the first begins with the essential ones."""
    first = list(_ESSENTIAL)
    chance.shuffle(first)
    deck = first + _shuffled(chance, [card for card in _ALL if card not in first])
    while True:
        for kind, target, everyone in deck:
            lasts_s = chance.uniform(*LASTS_S.get(target, ANY_S)) if kind is Kind.FREEZE else 0.0
            yield Fault(kind, target, everyone, chance.random(), lasts_s)
        deck = _shuffled(chance, list(_ALL))


def _shuffled(
    chance: random.Random, cards: list[tuple[Kind, Target, bool]]
) -> list[tuple[Kind, Target, bool]]:
    chance.shuffle(cards)
    return cards


ENDS_S: Final = 60.0
"""Longest that a process may take to end after SIGTERM; then it is killed, and has not drained."""


async def inflict(stack: Stack, fault: Fault, victims: Sequence[str]) -> list[int]:
    """Do it to the processes of these names, and return when it is over: exit statuses of those that have ended."""
    processes = [stack.process(name) for name in victims]
    if fault.kind is Kind.FREEZE:
        try:
            for process in processes:
                signal_group(process.pid, signal.SIGSTOP)
            await asyncio.sleep(fault.lasts_s)
        finally:
            for process in processes:
                if not process.ended.is_set():
                    signal_group(process.pid, signal.SIGCONT)
        return []
    number = signal.SIGKILL if fault.kind is Kind.KILL else signal.SIGTERM
    try:
        async with asyncio.timeout(ENDS_S):
            return await ended_by(processes, number)
    except TimeoutError:
        return await ended_by(processes, signal.SIGKILL)


async def ended_by(processes: Sequence[StackProcess], number: signal.Signals) -> list[int]:
    """Exit statuses after a signal."""
    return await asyncio.gather(*(process.crash(number) for process in processes))


WHOLE_S: Final = 180.0
"""Longest that a stack may take to be whole again; loading models on a busy machine takes its time."""


async def wait_whole(stack: Stack, servers: int, limit_s: float) -> None:
    """Wait after faults until all planned instances are ready, `servers` servers run, and all gateways agree.

    Raises:
        LaunchError: something is still missing after `limit_s`.
    """
    deadline, plan = Deadline.after_ms(1e3 * limit_s), stack.plan

    def is_whole(fleet: Fleet) -> bool:
        counts = [
            len(stack.instances(service)) >= n * len(plan.models_of(service))
            for service, n in plan.replicas.items()
        ]
        return all(counts) and len(stack.servers) >= servers and not stack.missing(fleet)

    await stack.watch.until(
        is_whole, limit_s, lambda fleet: f"not whole: {stack.missing(fleet) or 'processes are missing'}."
    )
    for server in stack.servers:
        await stack.process(server).announced(deadline.remaining_s())
    for url in stack.urls:
        await answers_200(f"{url}/readyz", deadline.remaining_s())


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
    """Disturbs `stack`, in step with the load's `pace`."""

    def __init__(self, stack: Stack, pace: Pace) -> None:
        self._stack, self._pace = stack, pace
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
                await wait_whole(self._stack, self._servers, WHOLE_S)
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
        one.statuses = await inflict(self._stack, one.fault, one.victims)
        one.over_s = time.monotonic()
