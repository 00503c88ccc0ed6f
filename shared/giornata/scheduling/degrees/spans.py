"""Free devices over time, and the least of their time that makes a row's steps by its deadline. Pure.

Steps are fluid here: one may be cut, and a degree change at any moment. What that loses is won back where steps begin,
by waiting for wider devices and by widening.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from giornata.scheduling.degrees.frontier import EPS, DegreeFrontier


@dataclass(frozen=True, slots=True)
class FreeDeviceSpans:
    """How many devices are free from `starts[i]` on, until the next start; the last span has no end."""

    starts: tuple[float, ...]
    free: tuple[int, ...]

    @classmethod
    def of(cls, now_s: float, devices: int, held: Iterable[tuple[float, int]]) -> FreeDeviceSpans:
        """All `devices` but those that are `held` until a time; pairs of (until, how many)."""
        until: dict[float, int] = {}
        busy = 0
        for end_s, count in held:
            if end_s > now_s:
                until[end_s] = until.get(end_s, 0) + count
                busy += count
        starts, free = [now_s], [devices - busy]
        for end_s in sorted(until):
            starts.append(end_s)
            free.append(free[-1] + until[end_s])
        return cls(tuple(starts), tuple(free))

    @classmethod
    def merged(cls, starts: Sequence[float], free: Sequence[int]) -> FreeDeviceSpans:
        """Spans of which neighbours may be alike."""
        places = [place for place, devices in enumerate(free) if not place or devices != free[place - 1]]
        return cls(tuple([starts[place] for place in places]), tuple([free[place] for place in places]))

    def at(self, at_s: float) -> int:
        """Devices that are free at a time, which is not before the first start."""
        return self.free[bisect_right(self.starts, at_s) - 1]

    def area(self, end_s: float) -> float:
        """Device-seconds that are free until a time, which is not before the first start."""
        edges = zip(self.starts, (*self.starts[1:], math.inf), self.free, strict=True)
        return sum((min(end, end_s) - begin) * free for begin, end, free in edges if begin < end_s)


@dataclass(frozen=True, slots=True)
class DegreePlan:
    """The degrees of a row over time.

    Until `cut_s` it has the widest of the first `rungs` of its frontier that the spans allow, then the widest of one
    less.
    """

    spans: FreeDeviceSpans
    """What was free for it."""
    start_s: float
    due_s: float
    cut_s: float
    rungs: int
    widest: tuple[tuple[int, ...], ...]
    """See :attr:`DegreeFrontier.widest`."""
    area: float
    """Device-seconds."""

    def degree(self, at_s: float) -> int:
        """Its degree at a time, 0 for none."""
        if not self.start_s - EPS <= at_s < self.due_s - EPS:
            return 0
        return self.widest[self.rungs - (at_s >= self.cut_s - EPS)][self.spans.at(max(at_s, self.start_s))]

    def wider(self, at_s: float) -> tuple[float, int] | None:
        """When it next has a degree above that of `at_s`, and which."""
        now, starts = self.degree(at_s), self.spans.starts
        for place in range(bisect_right(starts, at_s), len(starts)):
            later = self.degree(starts[place])
            if later > now:
                return starts[place], later
        return None

    def left(self) -> FreeDeviceSpans:
        """What stays free beside it."""
        starts, free = self.spans.starts, self.spans.free
        first, last = self.widest[self.rungs], self.widest[self.rungs - 1]
        begin, end = bisect_right(starts, self.start_s) - 1, bisect_left(starts, self.due_s)
        before = begin + (starts[begin] < self.start_s)
        cuts, left = list(starts[:before]), list(free[:before])
        edges = (self.start_s, *starts[begin + 1 : end], self.due_s)
        for place, (begin_s, end_s) in enumerate(pairwise(edges), begin):
            had = free[place]
            if begin_s < self.cut_s:
                cuts.append(begin_s)
                left.append(had - first[had])
            if self.cut_s < end_s:
                cuts.append(max(begin_s, self.cut_s))
                left.append(had - last[had])
        if end == len(starts) or self.due_s < starts[end]:
            cuts.append(self.due_s)
            left.append(free[end - 1])
        return FreeDeviceSpans.merged([*cuts, *starts[end:]], [*left, *free[end:]])


def fit(
    spans: FreeDeviceSpans, start_s: float, due_s: float, steps: float, ladder: DegreeFrontier
) -> DegreePlan | None:
    """The plan of least device-time for so many steps from a start to a deadline; None where none is in time.

    It takes the cheapest degree over the whole window, then rung by rung the next one on the earliest spans that have
    it free.
    """
    starts, free = spans.starts, spans.free
    seconds = [0.0] * len(ladder.widest[0])
    place = bisect_right(starts, start_s) - 1
    begin_s, last = start_s, len(starts) - 1
    while begin_s < due_s:
        end_s = min(starts[place + 1], due_s) if place < last else due_s
        seconds[free[place]] += end_s - begin_s
        begin_s = end_s
        place += 1
    area = before = 0.0
    for index, rung in enumerate(ladder.rungs):
        here = sum(seconds[rung.degree :])
        wider = rung.degree - (ladder.rungs[index - 1].degree if index else 0)
        if steps - before > rung.more * here + EPS:
            before += rung.more * here
            area += wider * here
            continue
        needed_s = max(0.0, (steps - before) / rung.more)
        cut_s = _cut(spans, start_s, due_s, needed_s, rung.degree)
        return DegreePlan(spans, start_s, due_s, cut_s, index + 1, ladder.widest, area + wider * needed_s)
    return None


def _cut(spans: FreeDeviceSpans, start_s: float, due_s: float, needed_s: float, degree: int) -> float:
    """When `degree` devices have been free for so many seconds since the start."""
    starts, free = spans.starts, spans.free
    place = bisect_right(starts, start_s) - 1
    begin_s, last = start_s, len(starts) - 1
    while begin_s < due_s:
        end_s = min(starts[place + 1], due_s) if place < last else due_s
        if free[place] >= degree:
            if end_s - begin_s >= needed_s:
                return begin_s + needed_s
            needed_s -= end_s - begin_s
        begin_s = end_s
        place += 1
    return due_s
