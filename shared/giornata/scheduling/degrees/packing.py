"""Which rows are promised their deadlines, and the device-time that each gets for it. Pure.

Rows come by deadline, each with the least device-time that meets it, as the earliest deadline first. A row that does
not fit pushes out the one with the largest plan if all others then fit (Moore and Hodgson's rule for one machine).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from giornata.scheduling.degrees.frontier import EPS, Frontier
from giornata.scheduling.degrees.spans import Plan, Spans, fit

_ROUNDS: Final = 3
"""Orders that are tried for rows that pay for a pause."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to make a row's steps."""

    steps: float
    """Steps that the row has to make; what a move costs beside them counts as parts of a step."""
    ladder: Frontier


@dataclass(frozen=True, slots=True)
class Wish:
    """A row that would end by its deadline."""

    key: Hashable
    start_s: float
    """When its step in flight ends, else now."""
    due_s: float
    ways: tuple[Way, ...]
    """The first one that is in time is taken."""
    work_s: float
    """Device-seconds that it takes at the least."""
    batch: bool = False
    """Whether it is of less priority than others."""
    stays: bool = False
    """Whether it has begun and pays if others get its devices."""
    weight: float = 1.0
    """Weight of the row's tenant."""

    def fit(self, spans: Spans) -> Plan | None:
        """Its plan in what is free; None where none is in time."""
        for way in self.ways:
            plan = fit(spans, self.start_s, self.due_s, way.steps, way.ladder)
            if plan is not None:
                return plan
        return None

    def may_push(self, other: Wish, area: float) -> bool:
        """Whether it may take the place of `other`, whose plan has this `area`.

        Batch never pushes out interactive, which pushes out batch of any size. Among equals the larger plan goes.
        """
        if self.batch != other.batch:
            return other.batch
        return area > self.work_s


@dataclass(frozen=True, slots=True)
class _Kept:
    wish: Wish
    plan: Plan
    left: Spans
    """What stays free beside it and those before it."""


def pack(wishes: Iterable[Wish], spans: Spans, *, pushes: bool = True) -> Mapping[Hashable, Plan]:
    """The plans of the rows that are promised their deadlines, by key.

    Rows that would pay for a pause come first where as many deadlines are kept so.

    Args:
        wishes: of rows.
        spans: devices that are free over time, from now on.
        pushes: whether a row may push out another one.
    """
    by_due = sorted(wishes, key=lambda wish: wish.due_s)
    if not any(wish.stays for wish in by_due):
        return _packed(by_due, spans, pushes=pushes)
    urgent: set[Hashable] = set()
    by_deadline: dict[Hashable, Plan] | None = None
    for _ in range(_ROUNDS):
        ordered = sorted(by_due, key=lambda wish: (not wish.stays and wish.key not in urgent, wish.due_s))
        unpaused = _packed(ordered, spans, pushes=pushes)
        if len(unpaused) == len(by_due):
            return unpaused
        by_deadline = by_deadline or _packed(by_due, spans, pushes=pushes)
        if len(unpaused) >= len(by_deadline):
            return unpaused
        urgent |= by_deadline.keys() - unpaused.keys()
    return by_deadline or {}


def _packed(wishes: Sequence[Wish], spans: Spans, *, pushes: bool) -> dict[Hashable, Plan]:
    """Plans of rows that come in this order."""
    kept: list[_Kept] = []
    for wish in wishes:
        if not _append(kept, wish, spans) and pushes:
            kept = _pushed(kept, wish, spans) or _before_batch(kept, wish, spans) or kept
    return {entry.wish.key: entry.plan for entry in kept}


def _append(kept: list[_Kept], wish: Wish, spans: Spans) -> bool:
    """Add a row behind those of earlier deadlines, if it fits."""
    plan = wish.fit(kept[-1].left if kept else spans)
    if plan is not None:
        kept.append(_Kept(wish, plan, plan.left()))
    return plan is not None


def _pushed(kept: Sequence[_Kept], wish: Wish, spans: Spans) -> list[_Kept] | None:
    """`kept` with `wish` in the place of one of them, so that all others stay in time; None where that cannot be.

    A heavier tenant's row goes only where no other will do.
    """
    end_s = max([wish.due_s, *(entry.wish.due_s for entry in kept)])
    spare = spans.area(end_s) - wish.work_s - sum(entry.wish.work_s for entry in kept)
    able = [
        place
        for place, entry in enumerate(kept)
        if spare + entry.wish.work_s >= -EPS and wish.may_push(entry.wish, entry.plan.area)
    ]
    able.sort(
        key=lambda place: (
            not kept[place].wish.batch,
            kept[place].wish.weight > wish.weight,
            -kept[place].plan.area,
        )
    )
    for place in able:
        grown = list(kept[:place])  # rows before it keep their plans
        if all(_append(grown, other, spans) for other in (*(e.wish for e in kept[place + 1 :]), wish)):
            return grown
    return None


def _before_batch(kept: Sequence[_Kept], wish: Wish, spans: Spans) -> list[_Kept] | None:
    """`kept` with an interactive row, and of its batch rows those that then fit; None where that cannot be."""
    batch = [entry.wish for entry in kept if entry.wish.batch]
    if wish.batch or not batch:
        return None
    grown: list[_Kept] = []
    for other in (*(entry.wish for entry in kept if not entry.wish.batch), wish):
        if not _append(grown, other, spans):
            return None
    for other in batch:
        _append(grown, other, spans)
    return grown
