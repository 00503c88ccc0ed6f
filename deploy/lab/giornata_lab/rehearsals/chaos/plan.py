"""Which faults come, and after how many edits. Pure: the same seed draws the same plan."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from giornata.wire.workers import ServiceName


class Kind(StrEnum):
    """What happens to a process, its network, its store or its clock."""

    KILL = "kill"
    """SIGKILL, as a crash; a successor is started."""
    FREEZE = "freeze"
    """SIGSTOP to it and its children, SIGCONT after a while, as on a machine that stalls."""
    RESTART = "restart"
    """SIGTERM: it drains; a successor is started."""
    DEAF = "deaf"
    """Nothing that NATS sends reaches it for a while; then everything does, late."""
    MUTE = "mute"
    """Nothing that it sends reaches NATS for a while; then everything does, late."""
    SLOW = "slow"
    """Every message of every service to or from it takes a while."""
    FULL = "full"
    """Its store takes nothing more for a while."""
    CLOCK = "clock"
    """The wall clock jumps by up to an hour, for the service and its successors; later jumps start from this one."""


SIGNALS: Final = frozenset({Kind.KILL, Kind.FREEZE, Kind.RESTART})
"""Kinds that come to processes, of any target."""
LASTING: Final = frozenset({Kind.FREEZE, Kind.DEAF, Kind.MUTE, Kind.SLOW, Kind.FULL})
"""Kinds that end after a while by themselves."""


class Server(StrEnum):
    """What is no service."""

    NATS = "nats"
    VALKEY = "valkey"


Target = ServiceName | Server
TARGETS: Final[tuple[Target, ...]] = (*ServiceName, *Server)

LASTS_S: Final[dict[tuple[Kind, Target], tuple[float, float]]] = {
    (Kind.FREEZE, ServiceName.DENOISER): (5.0, 8.0),  # beyond its silence and its stall limit
    (Kind.FREEZE, ServiceName.ROUTER): (2.0, 10.0),  # less and more than its lease
    (Kind.FREEZE, Server.NATS): (1.0, 6.0),
}
"""Between which seconds a fault of a target lasts, where not :data:`ANY_S`."""
ANY_S: Final = (0.5, 8.0)
DELAY_S: Final = (0.02, 0.3)
"""Between which seconds a message takes each way on a slow network."""
JUMP_S: Final = 3600
"""A clock jumps by at most so much, to and fro."""
WIRED: Final = (ServiceName.GATEWAY, ServiceName.ROUTER, ServiceName.DENOISER, ServiceName.PREPOST)
"""Services that every edit needs."""
AT_ONCE: Final = 8
"""Edits that are in progress at a time, at most."""
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
    """How long a fault of a kind in :data:`LASTING` lasts."""
    delay_s: float = 0.0
    """Delay of a slow network, each way."""
    jump_s: int = 0
    """How far a clock jumps; less than 0 for back."""


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
    *((kind, target, False) for kind in Kind if kind in SIGNALS for target in TARGETS),
    *((Kind.KILL, service, True) for service in WIRED),
    *((kind, service, False) for kind in (Kind.DEAF, Kind.MUTE, Kind.CLOCK) for service in WIRED),
    (Kind.SLOW, Server.NATS, False),
    *((Kind.FULL, server, False) for server in Server),
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
            lasts_s = chance.uniform(*LASTS_S.get((kind, target), ANY_S)) if kind in LASTING else 0.0
            delay_s = chance.uniform(*DELAY_S) if kind is Kind.SLOW else 0.0
            jump_s = chance.randint(-JUMP_S, JUMP_S) if kind is Kind.CLOCK else 0
            yield Fault(kind, target, everyone, chance.random(), lasts_s, delay_s, jump_s)
        deck = _shuffled(chance, list(_ALL))


def _shuffled(
    chance: random.Random, cards: list[tuple[Kind, Target, bool]]
) -> list[tuple[Kind, Target, bool]]:
    chance.shuffle(cards)
    return cards
