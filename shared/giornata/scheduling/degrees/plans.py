"""Degrees over time: those worth planning with, free devices, and which rows are promised their deadlines. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final

from giornata.scheduling.degrees.pool import Devices, PoolRow, Times
from giornata.wire.jobs import Priority

EPS = 1e-9
_SHAPES = 4096
"""Frontiers that are remembered."""


@dataclass(frozen=True, slots=True)
class FrontierDegree:
    """A degree of a frontier."""

    degree: int
    rate: float
    """Steps a second."""
    more: float
    """By how much `rate` is above that of the rung before."""


@dataclass(frozen=True, slots=True)
class DegreeFrontier:
    """The efficient degrees of a row, cheapest first: each is faster than the one before and takes more device-time.

    Of all mixtures of degrees that make so many steps in so much time, one of two neighbours here takes the least
    device-time: they are the corners of the lower convex hull of (time, device-time) of a step.
    """

    rungs: tuple[FrontierDegree, ...]
    widest: tuple[tuple[int, ...], ...]
    """`widest[r][c]`: the degree of the widest of the first r rungs that `c` free devices allow, 0 for none."""
    fastest_s: float
    """Seconds of a step at the last rung."""
    work_s: float
    """Device-seconds of a step at the first rung: no degree takes fewer."""


def degree_frontier(times: Times, devices: int) -> DegreeFrontier:
    """The frontier of `times` for a pool of so many devices; degrees that are wider than it are left out.

    Raises:
        ValueError: no degree is left.
    """
    return _frontier(tuple(times.items()), devices)


@lru_cache(maxsize=_SHAPES)
def _frontier(times: tuple[tuple[int, float], ...], devices: int) -> DegreeFrontier:
    corners = _corners(
        [(seconds, degree * seconds, degree) for degree, seconds in times if degree <= devices]
    )
    if not corners:
        raise ValueError(f"a step needs a time for a degree of 1 to {devices}; received {dict(times)}")
    rungs, rate = [], 0.0
    for seconds, _, degree in corners:
        rungs.append(FrontierDegree(degree, 1 / seconds, 1 / seconds - rate))
        rate = 1 / seconds
    degrees = [rung.degree for rung in rungs]
    widest = tuple(
        tuple(max((d for d in degrees[:first] if d <= free), default=0) for free in range(devices + 1))
        for first in range(len(rungs) + 1)
    )
    return DegreeFrontier(tuple(rungs), widest, corners[-1][0], corners[0][1])


def _corners(points: Sequence[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """The lower convex hull of points (seconds, device-seconds, degree), slow and cheap ones first."""
    best: list[tuple[float, float, int]] = []
    for point in sorted(points, reverse=True):
        while best and best[-1][1] >= point[1]:
            best.pop()
        while len(best) > 1 and _above(best[-2], best[-1], point):
            best.pop()
        best.append(point)
    return best


def _above(
    left: tuple[float, float, int], middle: tuple[float, float, int], right: tuple[float, float, int]
) -> bool:
    """Return whether `middle` is not below the line from `left` to `right`."""
    rise, run = middle[1] - left[1], left[0] - middle[0]
    return rise * (left[0] - right[0]) >= (right[1] - left[1]) * run


# Steps are fluid here: one may be cut, and a degree change at any moment. What that loses is won back where
# steps begin, by waiting for wider devices and by widening.


@dataclass(frozen=True, slots=True)
class FreeDeviceSpans:
    """The number of devices that are free from `starts[i]` on, until the next start; the last span has no end."""

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

    def degree(self, at_s: float) -> int:
        """Its degree at a time, 0 for none."""
        if not self.start_s - EPS <= at_s < self.due_s - EPS:
            return 0
        return self.widest[self.rungs - (at_s >= self.cut_s - EPS)][self.spans.at(max(at_s, self.start_s))]

    def wider(self, at_s: float) -> tuple[float, int] | None:
        """Return when it next has a degree above that of `at_s`, and which."""
        now, starts = self.degree(at_s), self.spans.starts
        for place in range(bisect_right(starts, at_s), len(starts)):
            later = self.degree(starts[place])
            if later > now:
                return starts[place], later
        return None

    def left(self) -> FreeDeviceSpans:
        """Return what stays free beside it."""
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


def fit_degrees(
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
    before = 0.0
    for index, rung in enumerate(ladder.rungs):
        here = sum(seconds[rung.degree :])
        if steps - before > rung.more * here + EPS:
            before += rung.more * here
            continue
        needed_s = max(0.0, (steps - before) / rung.more)
        cut_s = _cut(spans, start_s, due_s, needed_s, rung.degree)
        return DegreePlan(spans, start_s, due_s, cut_s, index + 1, ladder.widest)
    return None


def _cut(spans: FreeDeviceSpans, start_s: float, due_s: float, needed_s: float, degree: int) -> float:
    """Return when `degree` devices have been free for so many seconds since the start."""
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


# Rows come by deadline, each with the least device-time that meets it, as the earliest deadline first.
# Where batch takes an interactive row's place, all interactive rows come first.


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
    batch: bool = False
    """Whether it is of less priority than others."""
    stays: bool = False
    """Whether it has begun and pays if others get its devices."""

    def fit(self, spans: FreeDeviceSpans) -> DegreePlan | None:
        """Its plan in what is free; None where none is in time."""
        for way in self.ways:
            plan = fit_degrees(spans, self.start_s, self.due_s, way.steps, way.ladder)
            if plan is not None:
                return plan
        return None


def pack_deadlines(wishes: Iterable[PackingRequest], spans: FreeDeviceSpans) -> Mapping[Hashable, DegreePlan]:
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


@dataclass(frozen=True, slots=True)
class RowDegreeTimes:
    """Times of a row's steps by the degrees that this pool has now."""

    step_s: Times
    moved_s: Times
    ladder: DegreeFrontier
    pays: bool
    """Whether a move costs anything."""
    extra: float
    """What its first step here, or a move, takes longer, in steps."""

    def least_s(self, steps: int, kept: int) -> float:
        """Least seconds of so many steps, where degree `kept`, 0 for none, needs no move."""
        fastest_s = self.ladder.fastest_s
        if not self.pays:
            return steps * fastest_s
        moving_s = min(self.moved_s.values()) + (steps - 1) * fastest_s
        return min(moving_s, steps * self.step_s[kept]) if kept else moving_s


@lru_cache(maxsize=_SHAPES)
def _shape(
    step_s: tuple[tuple[int, float], ...],
    moved_s: tuple[tuple[int, float], ...],
    degrees: frozenset[int],
    devices: int,
) -> RowDegreeTimes:
    steps = {degree: seconds for degree, seconds in step_s if degree in degrees}
    moves = steps | {degree: seconds for degree, seconds in moved_s if degree in steps}
    ladder = degree_frontier(steps, devices)
    cheapest = ladder.rungs[0]
    extra = (moves[cheapest.degree] - steps[cheapest.degree]) * cheapest.rate
    pays = any(moves[degree] > seconds + EPS for degree, seconds in steps.items())
    return RowDegreeTimes(steps, moves, ladder, pays, extra)


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """A row with its shape in a pool of so many devices."""

    row: PoolRow
    shape: RowDegreeTimes
    kept: int
    """The degree that needs no move; 0 for none."""
    devices: int

    @property
    def work_s(self) -> float:
        """Device-seconds that its steps take at the least."""
        return self.row.left * self.shape.ladder.work_s

    @property
    def stays(self) -> bool:
        """Return whether it has begun on devices that it pays to leave."""
        return self.shape.pays and self.kept > 0

    def step_s(self, degree: int) -> float:
        """Seconds of its next step at this degree."""
        return (self.shape.step_s if degree == self.kept else self.shape.moved_s)[degree]

    def step_on_s(self, devices: Devices) -> float:
        """Seconds of its next step on these devices."""
        own = self.kept and devices == self.row.devices
        return (self.shape.step_s if own else self.shape.moved_s)[len(devices)]

    def start_s(self, now_s: float) -> float:
        """Return when it can begin a step."""
        return now_s if self.row.until_s is None else max(now_s, self.row.until_s)

    def hopeless(self, now_s: float) -> bool:
        """Return whether it is late however many devices it has; a row without deadline is not."""
        least_s = self.shape.least_s(self.row.left, self.kept) if self.row.left else 0.0
        return self.start_s(now_s) + least_s > self.row.due_s + EPS

    def wish(self, now_s: float) -> PackingRequest:
        """What it asks of packing: to stay as it is, where a move costs something, else any mixture of degrees."""
        shape, left = self.shape, self.row.left
        ways = [PackingOption(left + shape.extra if shape.pays else left, shape.ladder)]
        if self.stays:
            ways.insert(
                0, PackingOption(left, degree_frontier({self.kept: shape.step_s[self.kept]}, self.devices))
            )
        return PackingRequest(
            self.row.key,
            self.start_s(now_s),
            self.row.due_s,
            tuple(ways),
            self.row.priority is Priority.BATCH,
            self.stays,
        )


def make_candidate(row: PoolRow, degrees: AbstractSet[int], there: AbstractSet[int]) -> CandidateRow | None:
    """`row` with those of its degrees that the pool has; None where there are none.

    A template run has its narrowest degree alone. A row keeps nothing of devices that are not `there` any more.
    """
    able = row.step_s.keys() & degrees
    if not able:
        return None
    if row.background:
        able = {min(able)}
    shape = _shape(tuple(row.step_s.items()), tuple(row.moved_s.items()), frozenset(able), len(there))
    kept = len(row.devices) if there >= set(row.devices) else 0
    return CandidateRow(row, shape, kept if kept in able else 0, len(there))
