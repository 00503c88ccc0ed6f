"""What ``giornata_lab.bench.degrees`` simulates: tables of workloads and the rules that serve them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from giornata.scheduling.degrees.pool import DEGREES
from giornata.scheduling.degrees.rule import ReplanningOptions
from giornata_lab.simulation.degrees.baselines import RoundSwitches, TieBreak
from giornata_lab.simulation.degrees.rules import POWERS, RuleName, RuleSetting
from giornata_lab.simulation.degrees.workloads import NIRVANA, PoolWorkload, SizeMix

SCALES: Final = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
RATES: Final = (6.0, 9.0, 12.0, 15.0, 18.0)
MASKED_RATES: Final = (12.0, 48.0, 96.0, 144.0, 192.0)
BETWEEN: Final = (1, 2, 3, 5, 7, 10)
BOUND: Final = "bound"

OURS: Final = RuleSetting()
EVENTS: Final = RuleSetting(RuleName.EVENTS, POWERS)
AS_WRITTEN: Final = RuleSetting(
    RuleName.ROUNDS, POWERS, round_steps=5, rounds=RoundSwitches(ties=TieBreak.FEWEST)
)
BY_LENGTH: Final = tuple(RuleSetting(RuleName.ROUNDS, POWERS, round_steps=steps) for steps in (1, 2, 5))
TETRISERVE: Final = {"as written": AS_WRITTEN, **{f"rounds of {r.round_steps}": r for r in BY_LENGTH}}
BASELINES: Final[Mapping[str, RuleSetting]] = {
    **{f"degree {degree}": RuleSetting(RuleName.FIXED, (degree,)) for degree in POWERS},
    "best degree by resolution": RuleSetting(RuleName.RESOLUTION, POWERS),
    "the same, earliest deadline": RuleSetting(RuleName.DEADLINE, POWERS),
    "Algorithm 1 as written": AS_WRITTEN,
    **{f"Algorithm 1, rounds of {r.round_steps}": r for r in BY_LENGTH},
    "Algorithm 1 at events": EVENTS,
}
RULES: Final[Mapping[str, RuleSetting]] = {
    **BASELINES,
    "ours, degrees 1, 2, 4, 8": replace(OURS, degrees=POWERS),
    "ours": OURS,
}
PARTS: Final[Mapping[str, RuleSetting]] = {
    "ours": OURS,
    "without waiting": replace(OURS, parts=ReplanningOptions(waits=False)),
    "without widening": replace(OURS, parts=ReplanningOptions(widens=False)),
    "without ageing": replace(OURS, parts=ReplanningOptions(ages_s=math.inf)),
    "late rows in steps of any length": replace(OURS, parts=ReplanningOptions(cap_s=math.inf)),
    "without sharing steps": replace(OURS, parts=ReplanningOptions(shares=False)),
    "without degrees 3 and 6": replace(OURS, degrees=POWERS),
    "without degree 3": replace(OURS, degrees=(1, 2, 4, 6, 8)),
    "without degree 6": replace(OURS, degrees=(1, 2, 3, 4, 8)),
    "without 3 and 6, without waiting": replace(OURS, degrees=POWERS, parts=ReplanningOptions(waits=False)),
}
ROUND_PARTS: Final[Mapping[str, RuleSetting]] = {
    "Algorithm 1, rounds of 2": BY_LENGTH[1],
    **{
        f"rounds of 2 without {part.replace('_', ' ')}": replace(BY_LENGTH[1], rounds=switches)
        for part, switches in {
            "placement": RoundSwitches(placement=False),
            "scale_up": RoundSwitches(scale_up=False),
            "fill": RoundSwitches(fill=False),
            "idle_start": RoundSwitches(idle_start=False),
            "whole_steps": RoundSwitches(whole_steps=False),
        }.items()
    },
}
MASKED: Final = PoolWorkload(masks="production", steps=30, scale=1.5, per_minute=144)


@dataclass(frozen=True)
class PoolEntry:
    """A row of a table."""

    rule: RuleSetting
    in_full: bool = False
    """Whether it computes all tokens of masked pictures."""


@dataclass(frozen=True)
class Table:
    """Attainment of rules on workloads."""

    name: str
    loads: Mapping[str, PoolWorkload]
    """By column; their seeds are replaced."""
    entries: Mapping[str, PoolEntry]
    bound: bool = True


def tables() -> Iterator[Table]:
    """All of them."""
    for mix in SizeMix:
        loads = {f"{mix} {scale:.1f}": PoolWorkload(mix=mix, scale=scale) for scale in SCALES}
        yield Table(f"scale, {mix}", loads, _entries(RULES))
    for mix in SizeMix:
        loads = {f"{mix} 1.5, {rate:g}": PoolWorkload(mix=mix, scale=1.5, per_minute=rate) for rate in RATES}
        yield Table(f"rate, {mix}", loads, _entries(RULES))
    bursts = {f"{mix} 1.5, variation 3": PoolWorkload(mix=mix, scale=1.5, cv=3.0) for mix in SizeMix}
    yield Table("bursts", bursts, _entries(RULES))
    yield Table("masks", {f"{r:g} a minute": replace(MASKED, per_minute=r) for r in MASKED_RATES}, _masked())
    chosen = {f"{mix} {s:.1f}": PoolWorkload(mix=mix, scale=s) for mix in SizeMix for s in (1.0, 1.2, 1.5)}
    yield Table("parts", chosen, _entries({**PARTS, **ROUND_PARTS}))
    between = {f"{steps} steps between decisions": replace(OURS, steps_between=steps) for steps in BETWEEN}
    yield Table("steps between decisions", chosen, _entries(between), bound=False)
    groups = {"six groups a rank": OURS, "all 85 subsets": replace(OURS, every_subset=True)}
    yield Table("groups", chosen, _entries(groups), bound=False)
    saving = {
        f"{mix} 1.0, {saved:.0%} saved": PoolWorkload(mix=mix, saved=saved)
        for mix in SizeMix
        for saved in (0.0, NIRVANA, 0.35, 0.5)
    }
    rules = {"Algorithm 1 as written": AS_WRITTEN, "Algorithm 1, rounds of 2": BY_LENGTH[1], "ours": OURS}
    yield Table("prompt cache", saving, _entries(rules))
    short = {
        f"{mix} {s:.1f}": PoolWorkload(mix=mix, scale=s, steps=28) for mix in SizeMix for s in (1.0, 1.5)
    }
    yield Table("28 steps", short, _entries(RULES))


def _entries(rules: Mapping[str, RuleSetting]) -> Mapping[str, PoolEntry]:
    return {name: PoolEntry(rule) for name, rule in rules.items()}


def _masked() -> Mapping[str, PoolEntry]:
    rounds = replace(BY_LENGTH[1], degrees=DEGREES)
    return {
        "in full, Algorithm 1 in rounds of 2": PoolEntry(rounds, in_full=True),
        "in full, ours": PoolEntry(OURS, in_full=True),
        "masks, Algorithm 1 in rounds of 2": PoolEntry(rounds),
        "masks, Algorithm 1 at events": PoolEntry(replace(EVENTS, degrees=DEGREES)),
        "masks, degree 1": PoolEntry(BASELINES["degree 1"]),
        "masks, ours": PoolEntry(OURS),
        "masks, ours without sharing steps": PoolEntry(PARTS["without sharing steps"]),
    }


def best(shares: Sequence[float]) -> float:
    """The greatest share among round lengths at one point."""
    return max(shares)
