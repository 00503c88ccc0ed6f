"""The degrees of the steps that begin now, chosen in turns: for promised rows first, then for others. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from giornata.scheduling.degrees.candidates import CandidateRow
from giornata.scheduling.degrees.claims import DeviceReservations
from giornata.scheduling.degrees.frontier import EPS
from giornata.scheduling.degrees.spans import DegreePlan

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
