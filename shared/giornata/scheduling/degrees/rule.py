"""The degree rule: all is planned again at every arrival and end of a step. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from giornata.scheduling.degrees.plans import (
    EPS,
    CandidateRow,
    DegreePlan,
    FreeDeviceSpans,
    make_candidate,
    pack_deadlines,
)
from giornata.scheduling.degrees.pool import (
    DEGREES,
    DeviceRequest,
    Devices,
    DeviceSubsets,
    PoolDecision,
    PoolRow,
    SharedStepTime,
    StepStart,
    device_subsets,
)


@dataclass(frozen=True, slots=True)
class _DeviceReservation:
    devices: frozenset[int]
    due_s: float
    step_ends_s: float
    ends_s: float
    """When the last of its steps ends, if it goes on as it is."""


class DeviceReservations:
    """The devices of each row, from the steps in flight on."""

    def __init__(self, now_s: float, running: Iterable[CandidateRow]) -> None:
        self._now_s = now_s
        self._claims: list[_DeviceReservation] = []
        for each in running:
            self._add(each, each.row.devices, each.start_s(now_s))

    def keep(self, each: CandidateRow) -> None:
        """Count a row that begins a step on its own devices now."""
        self._add(each, each.row.devices, self._now_s + each.shape.step_s[each.kept], begun=1)

    def free(self, each: CandidateRow) -> bool:
        """Return whether a row's own devices are free."""
        own = set(each.row.devices)
        return not any(own & claim.devices for claim in self._claims)

    def awaits(self, each: CandidateRow, degree: int) -> bool:
        """Return whether a row should wait for its own devices rather than begin a step of `degree` on others.

        It should where it is in time even so, or ends sooner. Rows of earlier deadlines go before it there.
        """
        if not each.stays or self.free(each):
            return False
        left, shape = each.row.left, each.shape
        ends_s = self._freed_s(each) + left * shape.step_s[each.kept]
        moving_s = self._now_s + shape.moved_s[degree] + (left - 1) * shape.step_s[degree]
        return ends_s <= max(each.row.due_s if each.row.promised else 0.0, moving_s) + EPS

    def _freed_s(self, each: CandidateRow) -> float:
        latest_s = self._now_s
        for device in each.row.devices:
            freed_s = self._now_s
            for claim in self._claims:
                if device in claim.devices:
                    ends_s = claim.ends_s if claim.due_s <= each.row.due_s else claim.step_ends_s
                    freed_s += ends_s - self._now_s
            latest_s = max(latest_s, freed_s)
        return latest_s

    def _add(self, each: CandidateRow, devices: Devices, step_ends_s: float, begun: int = 0) -> None:
        step_s = each.shape.step_s.get(len(devices), each.shape.ladder.fastest_s)
        ends_s = step_ends_s + (each.row.left - begun) * step_s
        self._claims.append(_DeviceReservation(frozenset(devices), each.row.due_s, step_ends_s, ends_s))


@dataclass(frozen=True, slots=True)
class SharedStep:
    """Rows that are about to begin a step on the same devices."""

    rows: tuple[CandidateRow, ...]
    devices: Devices
    seconds: float

    def begin(self) -> StepStart:
        """As a decision says it."""
        return StepStart(tuple(each.row.key for each in self.rows), self.devices)


def share_steps(
    now_s: float,
    steps: Sequence[SharedStep],
    waiting: Iterable[CandidateRow],
    together: SharedStepTime,
    longest_s: float,
) -> list[SharedStep]:
    """`steps` with rows of `waiting` among theirs, each where it adds least device-time.

    A joined step takes at most `longest_s`, and no longer than its rows would take one after the other. A row that
    moving costs something joins on its own devices alone: elsewhere it would be bound to devices that another row is
    bound to, which planning does not see (measured: it loses more deadlines than it saves). Without a deadline it may
    begin so, among others without.
    """
    found = list(steps)
    for each in sorted(waiting, key=lambda each: (each.row.due_s, each.row.place)):
        best: tuple[float, int, SharedStep] | None = None
        for place, step in enumerate(found):
            joined = _joined(now_s, step, each, together, longest_s)
            if joined is not None:
                more = (joined.seconds - step.seconds) * len(step.devices)
                if best is None or more < best[0]:
                    best = more, place, joined
        if best is not None:
            found[best[1]] = best[2]
    return found


def _joined(
    now_s: float, step: SharedStep, each: CandidateRow, together: SharedStepTime, longest_s: float
) -> SharedStep | None:
    degree = len(step.devices)
    if degree not in each.shape.step_s or not _welcome(step, each):
        return None
    rows = (*step.rows, each)
    shared_s = together([one.row for one in rows], degree)
    if shared_s is None:
        return None
    moves_s = sum(one.step_on_s(step.devices) - one.shape.step_s[degree] for one in rows)
    alone_s = sum(one.step_on_s(step.devices) for one in rows)
    if shared_s + moves_s > min(longest_s, alone_s) + EPS:
        return None
    if any(now_s + moves_s + one.row.left * shared_s > one.row.due_s + EPS for one in rows):
        return None
    return SharedStep(rows, step.devices, shared_s + moves_s)


def _welcome(step: SharedStep, each: CandidateRow) -> bool:
    if any(one.row.promised != each.row.promised or one.row.background for one in step.rows):
        return False
    if not each.shape.pays or each.row.devices == step.devices:
        return True
    return not each.row.promised and not each.kept


SOON_S = 1e-6
"""A plan that begins so soon begins now."""


@dataclass(slots=True)
class DegreeChoice:
    """Degrees by row, and how many devices are free beside them. Each turn adds to them."""

    now_s: float
    ready: Sequence[CandidateRow]
    """Rows at a step boundary."""
    plans: Mapping[Hashable, DegreePlan]
    """Plans of the promised rows, by their keys."""
    claims: DeviceReservations
    free: int
    cap_s: float
    """How long a step may take of a row that is promised nothing, where one of its degrees allows."""
    degrees: dict[Hashable, int] = field(default_factory=dict)
    held: set[Hashable] = field(default_factory=set)
    """Rows that wait for wider devices."""
    held_until_s: float = math.inf
    """When the first of these gets them."""

    def begin_promised(self, *, waits: bool) -> None:
        """Begin the degrees that are planned for now, by deadline.

        A row waits where a wider degree that it gets later ends its step sooner.
        """
        for each in sorted(self._promised(), key=lambda each: each.row.due_s):
            plan = self.plans[each.row.key]
            degree = plan.degree(self.now_s + SOON_S)
            if not degree:
                continue
            if self.claims.awaits(each, degree):
                self.held.add(each.row.key)
                continue
            wider = plan.wider(self.now_s + SOON_S) if waits else None
            if wider and wider[0] + each.step_s(wider[1]) < self.now_s + each.step_s(degree) - EPS:
                self.held.add(each.row.key)
                self.held_until_s = min(self.held_until_s, wider[0])
            elif degree <= self.free:
                self._choose(each, degree)

    def begin_aged(self, ages_s: float) -> None:
        """Begin the one that has waited longest, if that is `ages_s` or more, of the rows that are promised nothing.

        When it is twice as old its step may take any time, lest it wait for devices that are never free together.
        """
        aged = [each for each in self._unpromised() if self.now_s - each.row.arrived_s >= ages_s]
        if aged:
            oldest = min(aged, key=lambda each: (each.row.background, each.row.arrived_s, each.row.place))
            old = self.now_s - oldest.row.arrived_s >= 2 * ages_s
            self._begin_unpromised(oldest, math.inf if old else self.cap_s)

    def widen(self, rows: Iterable[CandidateRow]) -> None:
        """Give free devices to `rows`, the largest gain for a device first.

        The gain is in steps a second, times the least device-time of a step, so that large and small rows compare. A
        row that a move costs something and that has begun stays as it is.
        """
        able = [each for each in rows if not each.stays]
        while self.free:
            best, chosen = (0.0, 0.0), None
            for each in able:
                gain, degree = self._gain(each)
                if chosen is None or (gain, -each.row.due_s) > best:
                    best, chosen = (gain, -each.row.due_s), (each, degree)
            if chosen is None or not chosen[1]:
                return
            self._choose(*chosen)

    def widen_promised(self) -> None:
        """Widen promised rows that do not wait."""
        self.widen([each for each in self._promised() if each.row.key not in self.held])

    def begin_late(self) -> None:
        """Begin rows that cannot be in time or were not promised it, least work first."""
        late = [each for each in self._unpromised() if each.row.promised]
        for each in sorted(late, key=lambda each: each.work_s):
            self._begin_unpromised(each, self.cap_s)

    def begin_line(self, *, widens: bool) -> None:
        """Begin rows without deadline in their order, each at its cheapest degree, and widen them."""
        line = [each for each in self._unpromised() if not each.row.promised and not each.row.background]
        for each in sorted(line, key=lambda each: (each.row.place, each.row.arrived_s)):
            self._begin_unpromised(each, self.cap_s)
        if widens:
            self.widen([each for each in line if each.row.key in self.degrees])

    def begin_templates(self) -> None:
        """Begin template runs."""
        for each in sorted(self._unpromised(), key=lambda each: (each.row.place, each.row.arrived_s)):
            if each.row.background:
                self._begin_unpromised(each, self.cap_s)

    def begin_any(self) -> None:
        """Begin the row that ends soonest at its fastest degree, promised ones first."""
        each = min(self.ready, key=lambda each: (each.row.key not in self.plans, each.work_s))
        able = [degree for degree in each.shape.step_s if degree <= self.free]
        self._choose(each, min(able, key=each.step_s, default=0))

    def waiting(self) -> list[CandidateRow]:
        """Rows that could share a step: they have no devices, wait for no wider ones, and can be in time."""
        return [
            each
            for each in self.ready
            if each.row.key not in self.degrees
            and each.row.key not in self.held
            and (each.row.key in self.plans or not each.row.promised)
            and not each.row.background
        ]

    def _promised(self) -> list[CandidateRow]:
        return [each for each in self.ready if each.row.key in self.plans]

    def _unpromised(self) -> list[CandidateRow]:
        """That have no degree yet."""
        return [
            each for each in self.ready if each.row.key not in self.plans and each.row.key not in self.degrees
        ]

    def _begin_unpromised(self, each: CandidateRow, cap_s: float) -> None:
        """Begin a step that delays nobody who waits, a late row's as short as can be, another's as cheap as can be."""
        longest_s = max(cap_s, each.shape.ladder.fastest_s)
        able = [
            degree
            for degree in each.shape.step_s
            if degree <= self.free
            and each.shape.step_s[degree] <= longest_s
            and self.now_s + each.step_s(degree) <= self.held_until_s + EPS
        ]
        if able:
            late = each.row.promised
            degree = min(able, key=each.step_s if late else (lambda k: k * each.step_s(k)))
            if self.claims.awaits(each, degree):
                return
            self._choose(each, degree)

    def _gain(self, each: CandidateRow) -> tuple[float, int]:
        """The most that a free device can gain for a row, and the degree that does."""
        times, had = each.shape.step_s, self.degrees.get(each.row.key, 0)
        now = 1 / times[had] if had else 0.0
        best = (0.0, 0)
        for degree, seconds in times.items():
            if had < degree <= had + self.free:
                gain = (1 / seconds - now) / (degree - had) * each.shape.ladder.work_s
                best = max(best, (gain, degree))
        return best

    def _choose(self, each: CandidateRow, degree: int) -> None:
        self.free -= degree - self.degrees.get(each.row.key, 0)
        self.degrees[each.row.key] = degree
        if each.stays and degree == each.kept and self.claims.free(each):
            self.claims.keep(each)


# The rule: all is planned again at every arrival and end of a step; nothing is bound beyond the steps that
# begin.
#
# 1. Free devices over time: all of them, less what steps in flight hold. 2. Rows by deadline, each given
# the least device-time that meets it (`giornata.scheduling.degrees.plans`). 3. Rows at a step boundary
# begin the degree that is planned for now, or wait where a wider one ends sooner. 4. Idle devices widen
# promised rows, by gain for a device. 5. Then rows that cannot be in time, least work first, in short
# steps. An old one comes before widening.
#
# Rows without deadline follow in the line's order, and age likewise; template runs come last. TetriServe
# (section 4) chooses in rounds instead.


AGES_S: Final = 30.0
CAP_S: Final = 0.25
OVERDUE_S: Final = 1e-3
"""When a step ends that should have ended."""


@dataclass(frozen=True, slots=True)
class ReplanningOptions:
    """Parts of the rule, each of which can be turned off."""

    waits: bool = True
    """Whether a row waits for wider devices."""
    widens: bool = True
    """Whether idle devices widen rows."""
    shares: bool = True
    """Whether rows share a step, where it is known how long that takes."""
    ages_s: float = AGES_S
    """How old a row without promise is when it comes before widening; infinite for never."""
    cap_s: float = CAP_S
    """How long a step may take of a row without promise, where one of its degrees allows; infinite for any time."""
    degrees: tuple[int, ...] = DEGREES
    """Those that are used, if the pool and the row have them."""


class ReplanningRule:
    """A :class:`~giornata.scheduling.degrees.pool.PoolRule` that plans all rows anew at every decision.

    Args:
        devices: that the pool has when none is lost.
        switches: which of its parts are on.
        together: how long rows take that share a step; without it none do.

    Raises:
        ValueError: there is no family of groups for so many devices.
    """

    def __init__(
        self,
        devices: int,
        switches: ReplanningOptions | None = None,
        *,
        together: SharedStepTime | None = None,
    ) -> None:
        self._switches = switches or ReplanningOptions()
        self._together = together if self._switches.shares else None
        used = [group for group in device_subsets(devices) if len(group) in self._switches.degrees]
        if not used:
            raise ValueError(f"{devices} devices need one of the degrees 1 to {devices}; received {switches}")
        self._subsets = DeviceSubsets(used)

    def decide(self, now_s: float, rows: Sequence[PoolRow], free: AbstractSet[int]) -> PoolDecision:
        """See :class:`~giornata.scheduling.degrees.pool.PoolRule`."""
        held = {row.devices: max(row.until_s, now_s + OVERDUE_S) for row in rows if row.until_s is not None}
        there = frozenset(free).union(*held)
        degrees = self._subsets.degrees(there)
        found = [each for row in rows if (each := make_candidate(row, degrees, there)) is not None]
        ready = [each for each in found if each.row.boundary]
        if not ready or not free:
            return PoolDecision()
        spans = FreeDeviceSpans.of(
            now_s, len(there), [(until_s, len(held_)) for held_, until_s in held.items()]
        )
        choice = self._choice(now_s, found, ready, spans, len(free))
        self._take_turns(choice)
        if not choice.degrees and not held:
            choice.begin_any()
        return PoolDecision(tuple(step.begin() for step in self._steps(choice, free)))

    def _choice(
        self,
        now_s: float,
        found: Sequence[CandidateRow],
        ready: Sequence[CandidateRow],
        spans: FreeDeviceSpans,
        free: int,
    ) -> DegreeChoice:
        """Return what is planned, and nothing chosen yet."""
        switches = self._switches
        hopeless = {each.row.key for each in found if each.hopeless(now_s)}
        wishes = [
            each.wish(now_s)
            for each in found
            if each.row.promised and each.row.left and each.row.key not in hopeless
        ]
        mixed = any(each.row.promised for each in found)
        return DegreeChoice(
            now_s,
            ready,
            pack_deadlines(wishes, spans),
            DeviceReservations(now_s, [each for each in found if not each.row.boundary]),
            free,
            cap_s=switches.cap_s if mixed else math.inf,
        )

    def _take_turns(self, choice: DegreeChoice) -> None:
        switches = self._switches
        choice.begin_promised(waits=switches.waits)
        if math.isfinite(switches.ages_s):
            choice.begin_aged(switches.ages_s)
        if switches.widens:
            choice.widen_promised()
        choice.begin_late()
        choice.begin_line(widens=switches.widens)
        choice.begin_templates()

    def _steps(self, choice: DegreeChoice, free: AbstractSet[int]) -> list[SharedStep]:
        """The chosen degrees on devices, with rows that share them."""
        chosen = {each.row.key: each for each in choice.ready if each.row.key in choice.degrees}
        seats = [
            DeviceRequest(
                key, choice.degrees[key], each.shape.step_s.keys(), each.row.devices, each.shape.pays
            )
            for key, each in chosen.items()
        ]
        owned = [
            each.row.devices
            for each in choice.ready
            if each.kept and each.shape.pays and each.row.key not in chosen
        ]
        placed = self._subsets.place(seats, free, owned)
        steps = [
            SharedStep((chosen[key],), devices, chosen[key].step_on_s(devices))
            for key, devices in placed.items()
        ]
        if self._together is None:
            return steps
        return share_steps(choice.now_s, steps, choice.waiting(), self._together, self._switches.cap_s)
