"""Rows of pools, drawn and made by hand, and a pool on a virtual clock that checks each decision."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from giornata.scheduling.degrees.pool import (
    PoolDecision,
    PoolRow,
    PoolRule,
    SharedStepTime,
    Times,
    device_subsets,
)
from giornata.wire.jobs import Priority
from tests.present import present

LARGE: Times = {1: 1.2, 2: 0.61, 3: 0.41, 4: 0.31, 6: 0.21, 8: 0.16}
"""Eight devices take hardly more device-time than one."""
SMALL: Times = {1: 0.03, 2: 0.025, 3: 0.024, 4: 0.0235, 6: 0.023, 8: 0.0228}
"""Devices beyond the first gain little."""
MIDDLE: Times = {1: 0.2, 2: 0.12, 3: 0.09, 4: 0.075, 6: 0.065, 8: 0.06}
KINDS: Sequence[Times] = (LARGE, SMALL, MIDDLE, {1: 0.1}, {2: 0.1, 4: 0.06, 1: 0.18})


def row(
    key: str,
    due_s: float = math.inf,
    left: int = 1,
    step_s: Times = LARGE,
    moved_s: Times | None = None,
    arrived_s: float = 0.0,
    **more: Any,
) -> PoolRow:
    """A row; without `moved_s` moves cost it nothing."""
    made = PoolRow(key, arrived_s, due_s, left, step_s, step_s if moved_s is None else moved_s)
    return replace(made, **more)


def masked(key: str, due_s: float, left: int, devices: tuple[int, ...] = (), **more: Any) -> PoolRow:
    """A row that moving costs ten steps."""
    return row(
        key, due_s, left, SMALL, {k: 10 * seconds for k, seconds in SMALL.items()}, devices=devices, **more
    )


def at_once(rows: Sequence[PoolRow], degree: int) -> float | None:
    """Rows of one size may share a step, which takes half as long as their steps together."""
    if len({each.size for each in rows}) > 1:
        return None
    return 0.5 * sum(each.step_s[degree] for each in rows) if len(rows) > 1 else None


def began(decision: PoolDecision) -> dict[object, tuple[int, ...]]:
    """Devices by row."""
    return {key: begin.devices for begin in decision.begins for key in begin.rows}


def degrees(decision: PoolDecision) -> dict[object, int]:
    return {key: len(devices) for key, devices in began(decision).items()}


@dataclass(frozen=True)
class Moment:
    """What a rule is asked."""

    devices: int
    now_s: float
    rows: tuple[PoolRow, ...]
    free: frozenset[int]


@st.composite
def moments(draw: st.DrawFn, most: int = 12) -> Moment:
    """Pools of 1 to 8 devices, some lost, with steps in flight, some shared, and rows at a boundary."""
    devices, now_s = draw(st.integers(1, 8)), draw(st.floats(0, 100))
    groups, free = device_subsets(devices), set(range(devices))
    rows: list[PoolRow] = []
    for number in range(draw(st.integers(0, most))):
        each = draw(_rows(number, now_s))
        able = [group for group in groups if len(group) in each.step_s]
        fits = [group for group in able if free.issuperset(group)]
        before = rows[-1] if rows else each
        where = draw(st.sampled_from(("new", "ran", "runs", "runs with the one before")))
        if where == "runs with the one before" and before.until_s is not None and before.devices in able:
            each = replace(each, devices=before.devices, until_s=before.until_s)
        elif where == "runs" and fits:
            each = replace(
                each, devices=draw(st.sampled_from(fits)), until_s=now_s + draw(st.floats(-0.1, 1))
            )
            free -= set(each.devices)
        elif where == "ran" and able:
            each = replace(each, devices=draw(st.sampled_from(able)))
        rows.append(each if each.until_s is not None or each.left else replace(each, left=1))
    free -= draw(st.sets(st.sampled_from(sorted(free)), max_size=3)) if free else set()
    return Moment(devices, now_s, tuple(draw(st.permutations(rows))), frozenset(free))


@st.composite
def _rows(draw: st.DrawFn, number: int, now_s: float) -> PoolRow:
    times = draw(st.sampled_from(KINDS))
    moved = draw(st.sampled_from((1.0, 8.0)))
    left = draw(st.integers(0, 40))
    slack = draw(st.floats(0.3, 6))
    due_s = draw(st.sampled_from((math.inf, now_s + left * min(times.values()) * slack)))
    background = draw(st.integers(0, 9)) == 0
    return PoolRow(
        number,
        now_s - draw(st.sampled_from((0.0, 1.0, 31.0))),
        math.inf if background else due_s,
        left,
        times,
        times if moved == 1 else {degree: moved * seconds for degree, seconds in times.items()},
        priority=draw(st.sampled_from(Priority)),
        place=draw(st.floats(0, 10)),
        background=background,
        size=len(times),
    )


def check(moment: Moment, decision: PoolDecision) -> None:
    """What all decisions keep to."""
    rows = {each.key: each for each in moment.rows}
    groups, taken, begun = device_subsets(moment.devices), set[int](), list[object]()
    for begin in decision.begins:
        assert begin.devices in groups
        assert moment.free.issuperset(begin.devices)
        assert taken.isdisjoint(begin.devices)
        taken.update(begin.devices)
        begun += begin.rows
        assert begin.rows
        assert all(rows[key].boundary and len(begin.devices) in rows[key].step_s for key in begin.rows)
    assert len(begun) == len(set(begun))
    there = moment.free.union(*(each.devices for each in moment.rows if each.until_s is not None))
    able = {len(group) for group in groups if there.issuperset(group)}
    computable = any(each.boundary and each.step_s.keys() & able for each in moment.rows)
    if computable and moment.free == there:
        assert decision.begins, "all devices idle with work"


@dataclass
class VirtualPool:
    """Runs a rule, and tells when rows end and what each step took."""

    rule: PoolRule
    devices: int = 8
    together: SharedStepTime = at_once
    ended: dict[object, float] = field(default_factory=dict)
    steps: list[tuple[float, object, tuple[int, ...]]] = field(default_factory=list)
    """When it began, whose, on which devices."""
    moved: int = 0

    def run(self, rows: Sequence[PoolRow]) -> Mapping[object, float]:
        """Ends of all rows."""
        order = itertools.count()
        coming: list[tuple[float, int, tuple[PoolRow, ...]]] = [
            (each.arrived_s, next(order), (each,)) for each in rows
        ]
        heapq.heapify(coming)
        here: dict[object, PoolRow] = {}
        while coming:
            now_s = coming[0][0]
            while coming and coming[0][0] <= now_s:
                for each in heapq.heappop(coming)[2]:
                    here[each.key] = replace(each, until_s=None)
                    if not each.left:
                        self.ended[each.key] = now_s
                        del here[each.key]
            if not here:
                continue
            busy = {device for each in here.values() if each.until_s is not None for device in each.devices}
            moment = Moment(self.devices, now_s, tuple(here.values()), frozenset(range(self.devices)) - busy)
            decision = self.rule.decide(now_s, moment.rows, moment.free)
            check(moment, decision)
            for begin in decision.begins:
                begun = [here[key] for key in begin.rows]
                until_s = now_s + self._seconds(begun, begin.devices)
                for each in begun:
                    self.steps.append((now_s, each.key, begin.devices))
                    here[each.key] = replace(each, left=each.left - 1, devices=begin.devices, until_s=until_s)
                heapq.heappush(coming, (until_s, next(order), tuple(here[key] for key in begin.rows)))
        return self.ended

    def _seconds(self, rows: Sequence[PoolRow], devices: tuple[int, ...]) -> float:
        degree, seconds = len(devices), 0.0
        for each in rows:
            if each.devices != devices:
                self.moved += bool(each.devices)
                seconds += each.moved_s[degree] - each.step_s[degree]
        shared_s = present(rows[0].step_s[degree] if len(rows) == 1 else self.together(rows, degree))
        return seconds + shared_s

    def degrees_of(self, key: object) -> list[int]:
        """Degrees of a row's steps, in their order."""
        return [len(devices) for _, whose, devices in self.steps if whose == key]
