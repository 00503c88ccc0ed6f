"""Which rows are promised their deadlines, and the device-time that each gets for it. Pure.

Rows come by deadline, each with the least device-time that meets it, as the earliest deadline first. Where batch takes
an interactive row's place, all interactive rows come first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from giornata.scheduling.degrees.frontier import DegreeFrontier
from giornata.scheduling.degrees.spans import DegreePlan, FreeDeviceSpans, fit

_ROUNDS: Final = 3
"""Orders that are tried for rows that pay for a pause."""


@dataclass(frozen=True, slots=True)
class PackingOption:
    """One way to make a row's steps."""

    steps: float
    """Steps that the row has to make; what a move costs beside them counts as parts of a step."""
    ladder: DegreeFrontier


@dataclass(frozen=True, slots=True)
class PackingRequest:
    """A row that would end by its deadline."""

    key: Hashable
    start_s: float
    """When its step in flight ends, else now."""
    due_s: float
    ways: tuple[PackingOption, ...]
    """The first one that is in time is taken."""
    work_s: float
    """Device-seconds that it takes at the least."""
    batch: bool = False
    """Whether it is of less priority than others."""
    stays: bool = False
    """Whether it has begun and pays if others get its devices."""

    def fit(self, spans: FreeDeviceSpans) -> DegreePlan | None:
        """Its plan in what is free; None where none is in time."""
        for way in self.ways:
            plan = fit(spans, self.start_s, self.due_s, way.steps, way.ladder)
            if plan is not None:
                return plan
        return None


def pack(wishes: Iterable[PackingRequest], spans: FreeDeviceSpans) -> Mapping[Hashable, DegreePlan]:
    """The plans of the rows that are promised their deadlines, by key.

    Rows that would pay for a pause come first where as many deadlines are kept so.

    Args:
        wishes: of rows.
        spans: devices that are free over time, from now on.
    """
    by_due = sorted(wishes, key=lambda wish: wish.due_s)
    if not any(wish.stays for wish in by_due):
        return _packed(by_due, spans)
    urgent: set[Hashable] = set()
    by_deadline: dict[Hashable, DegreePlan] | None = None
    for _ in range(_ROUNDS):
        ordered = sorted(by_due, key=lambda wish: (not wish.stays and wish.key not in urgent, wish.due_s))
        unpaused = _packed(ordered, spans)
        if len(unpaused) == len(by_due):
            return unpaused
        by_deadline = by_deadline or _packed(by_due, spans)
        if len(unpaused) >= len(by_deadline):
            return unpaused
        urgent |= by_deadline.keys() - unpaused.keys()
    return by_deadline or {}


def _packed(wishes: Sequence[PackingRequest], spans: FreeDeviceSpans) -> dict[Hashable, DegreePlan]:
    """Plans of rows that come in this order, or with interactive ones first where more of these are promised so."""
    plans = _in_order(wishes, spans)
    interactive = {wish.key for wish in wishes if not wish.batch}
    if interactive <= plans.keys() or plans.keys() <= interactive:
        return plans
    first = _in_order(sorted(wishes, key=lambda wish: wish.batch), spans)
    return max(plans, first, key=lambda found: len(interactive & found.keys()))


def _in_order(wishes: Iterable[PackingRequest], spans: FreeDeviceSpans) -> dict[Hashable, DegreePlan]:
    """Plans of rows that come in this order, each in what those before it leave."""
    plans: dict[Hashable, DegreePlan] = {}
    for wish in wishes:
        if (plan := wish.fit(spans)) is not None:
            plans[wish.key], spans = plan, plan.left()
    return plans
