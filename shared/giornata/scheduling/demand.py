"""The demand of a job on a worker, its cost there, and what workers still have to compute. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul
from typing import Final, NamedTuple

from giornata.planning.cost_model import StepParallelism, Ways, refresh_interval
from giornata.planning.operations import NetworkOperations, SequenceShape, StepCosts, control_work
from giornata.scheduling.adapters import NeededControl, NeededLora
from giornata.wire.adapters import ControlWork
from giornata.wire.models import BlockSpec
from giornata.wire.values import BlockMode
from giornata.wire.workers import RowProgress

# A step costs a base and what each of its rows adds (`giornata.planning.cost_model` is linear), all rows
# advance by one step together, and waiting rows take places in order as others leave, as far as a step may
# have so many rows and tokens. Between two such moments steps are alike, so that a virtual run costs one
# heap operation a row, not one a step.
#
# A forecast levels: the work of the workers ends at different times; waiting work, spread so that all
# workers end together, ends at a level that depends on how much comes before it. The level is exact for
# work that can be divided, and late rather than early for jobs that share steps.


LEAST: Final = 2
"""Rows that are always worth a step."""


class RowLoad(NamedTuple):
    """One row's addition to the steps that it takes part in."""

    steps: int
    """Still to compute, at least 1."""
    step_ms: float
    """Added to each step."""
    first_ms: float = 0.0
    """Added to the next step beyond that: the first step of an edit that reuses is computed in full."""
    tokens: int = 0
    """Text and image tokens of all its sequences, in each step."""
    first_tokens: int = 0
    """Tokens in the next step beyond these."""

    @property
    def work_ms(self) -> float:
        """Sum over its steps, without their base."""
        return self.steps * self.step_ms + self.first_ms


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker's rows."""

    places: int
    """Most rows that share a step."""
    base_ms: float
    """Time of a step without any row."""
    running: tuple[RowLoad, ...] = ()
    """They may be more than there are places."""
    waiting: tuple[RowLoad, ...] = ()
    tokens: float = math.inf
    """Most text and image tokens of a step; a row alone may have more."""

    def worth(self, slack: float) -> int:
        """The fewest rows a step with which it computes rows like its own as fast as with all places, but for `slack`.

        k rows a step that each add r to a base of b are computed at a rate of k / (b + k * r): beyond some rows, more
        of them make each slower and hardly any rate. At least two, so that one computes while the next one's inputs
        come; all places where the base is unknown or nothing is here.
        """
        rows = (*self.running, *self.waiting)
        row_ms = sum(row.step_ms for row in rows) / len(rows) if rows else 0.0
        if not slack or not row_ms:
            return self.places
        needed = (1 - slack) * self.places * self.base_ms / (self.base_ms + slack * self.places * row_ms)
        return min(self.places, max(LEAST, math.ceil(needed)))

    def running_what_fits(self, rows: Sequence[RowLoad]) -> WorkerLoad:
        """The backlog with `rows` instead of its own: the first ones run, as many as may share a step."""
        count = tokens = 0
        for row in rows[: self.places]:
            if count and tokens + row.tokens + row.first_tokens > self.tokens:
                break
            count, tokens = count + 1, tokens + row.tokens
        return WorkerLoad(self.places, self.base_ms, tuple(rows[:count]), tuple(rows[count:]), self.tokens)

    def ends_ms(self) -> list[float]:
        """Return when each row leaves, running ones first, in ms from now."""
        return self.times_ms()[1]

    def times_ms(self) -> tuple[list[float], list[float]]:
        """Return when each row joins, and when it leaves, running ones first, in ms from now."""
        rows = (*self.running, *self.waiting)
        begins, ends = [0.0] * len(rows), [0.0] * len(rows)
        active: list[tuple[int, int]] = []
        """(step after which it leaves, its index in `rows`)"""
        now_ms, step, each_ms = 0.0, 0, self.base_ms
        joined = tokens = 0
        while joined < len(rows) or active:
            boundary_ms = now_ms
            while joined < len(rows):
                row = rows[joined]
                full = len(active) >= self.places or tokens + row.tokens + row.first_tokens > self.tokens
                if full and active and joined >= len(self.running):
                    break
                heappush(active, (step + row.steps, joined))
                begins[joined] = boundary_ms
                each_ms += row.step_ms
                now_ms += row.first_ms  # all rows of its first step wait for it
                tokens += row.tokens
                joined += 1
            leaving = active[0][0]
            now_ms += (leaving - step) * each_ms
            step = leaving
            while active and active[0][0] == step:
                _, index = heappop(active)
                each_ms -= rows[index].step_ms
                tokens -= rows[index].tokens
                ends[index] = now_ms
        return begins, ends


class PlacementEstimate(NamedTuple):
    """An estimate of what a job's rows would do to a worker's backlog if they joined it."""

    finish_ms: float
    """From now until the last of the job's rows leaves."""
    delay_ms: float
    """How much later the other rows leave, summed over them."""
    begin_ms: float = 0.0
    """From now until the first of the job's rows has a place."""
    gained: int | None = None
    """In a pool: by how many more rows deadlines are kept with the job than without it, 0 where its own is not kept.
    None of a worker with one device, and of a job without a deadline."""

    def ready_after(self, ms: float) -> PlacementEstimate:
        """The same where the rows can begin only so long from now: only what waiting for a place does not hide counts.

        Others go on meanwhile, since a row that is not ready leaves its place in the step to them.
        """
        exposed_ms = max(0.0, ms - self.begin_ms)
        return self._replace(finish_ms=self.finish_ms + exposed_ms) if exposed_ms else self

    def adapted_after(self, wait_ms: float, needing_ms: float) -> PlacementEstimate:
        """The same where adapters are there only after `wait_ms`, and the rows' own steps that need them take so long.

        A row that waits for adapters is beside the batch: it costs others nothing, and then makes its steps. So it ends
        when its virtual run does, or its wait and those steps, whichever is later.
        """
        least_ms = wait_ms + needing_ms if wait_ms else 0.0
        return self._replace(finish_ms=least_ms) if least_ms > self.finish_ms else self


class FinishEstimator:
    """A backlog, prepared to be asked what becomes of it with more rows.

    Where all rows share a step, no row waits for another, and a row of r steps ends after r * base_ms plus, for every
    other row i, step_ms[i] * min(r, steps[i]): two look-ups in running sums by steps. Otherwise a virtual run tells.
    """

    def __init__(self, backlog: WorkerLoad) -> None:
        self.backlog = backlog
        rows = sorted(backlog.running, key=lambda row: row.steps)
        self._steps = [row.steps for row in rows]
        self._step_ms = _sums(row.step_ms for row in rows)
        self._own_ms = _sums(row.step_ms * row.steps for row in rows)
        self._row_steps = _sums(self._steps)
        self._first_ms = sum(row.first_ms for row in rows)
        self._room = backlog.tokens - sum(row.tokens for row in rows)

    @cached_property
    def ends_ms(self) -> list[float]:
        """See :meth:`WorkerLoad.ends_ms`."""
        return self.backlog.ends_ms()

    @property
    def drained_ms(self) -> float:
        """Time until all rows have left."""
        if self.backlog.waiting:
            return max(self.ends_ms)
        most = self._steps[-1] if self._steps else 0
        return self._first_ms + most * self.backlog.base_ms + self._own_ms[-1]

    def predict(self, rows: Sequence[RowLoad]) -> PlacementEstimate:
        """Return what happens if `rows`, at least one, join last."""
        backlog, first = self.backlog, rows[0]
        steps, count = first.steps, len(rows)
        if backlog.waiting or len(self._steps) + count > backlog.places:
            return self._run(rows)
        if count * first.tokens + first.first_tokens > self._room:
            return self._run(rows)
        if count > 1 and any(row != first for row in rows):
            return self._run(rows)
        done = bisect_right(self._steps, steps)
        others_ms = self._own_ms[done] + steps * (self._step_ms[-1] - self._step_ms[done])
        shared_steps = self._row_steps[done] + steps * (len(self._steps) - done)
        finish_ms = self._first_ms + steps * backlog.base_ms + others_ms + count * first.work_ms
        delay_ms = count * (first.step_ms * shared_steps + first.first_ms * len(self._steps))
        return PlacementEstimate(finish_ms, delay_ms)

    def _run(self, rows: Sequence[RowLoad]) -> PlacementEstimate:
        begins, ends = replace(self.backlog, waiting=(*self.backlog.waiting, *rows)).times_ms()
        delay_ms = max(0.0, sum(ends[: -len(rows)]) - sum(self.ends_ms))
        return PlacementEstimate(max(ends[-len(rows) :]), delay_ms, begins[-len(rows)])


def _sums(values: Iterable[float]) -> list[float]:
    """Running sums, from 0."""
    return [0.0, *accumulate(values)]


class WorkerEstimate(NamedTuple):
    """One worker, or several alike."""

    drained_ms: float
    """Time until all its rows are computed."""
    row_ms: float
    """Time that a row takes there."""
    workers: float = 1.0
    """How many it stands for."""


class JobFinishEstimate(NamedTuple):
    """An estimate of when a job is computed."""

    finish_ms: float
    """Time from now, after all that comes before it."""
    alone_ms: float
    """Time if nothing came before it."""


def estimate_computed(
    prospects: Sequence[WorkerEstimate], ahead: float, rows: float
) -> JobFinishEstimate | None:
    """Return when a job's rows are computed, each by any worker; None where no worker serves it or its cost is unknown.

    `prospects` are the workers that serve it, `ahead` is how much comes before it, in rows like its own.
    """
    if not prospects or any(worker.row_ms <= 0 for worker in prospects):
        return None
    # idle workers end together: no level has to be found
    fastest_ms = min(worker.row_ms for worker in prospects)
    alone_ms = max(fastest_ms, rows / sum(worker.workers / worker.row_ms for worker in prospects))
    return JobFinishEstimate(_level_ms(prospects, ahead + rows, fastest_ms), alone_ms)


def _level_ms(prospects: Sequence[WorkerEstimate], rows: float, fastest_ms: float) -> float:
    """The time at which all workers end together if they compute so many more rows."""
    workers = sorted(prospects)
    level_ms, rate, left = workers[0].drained_ms, 0.0, rows
    for index, worker in enumerate(workers):
        rate += worker.workers / worker.row_ms
        following = workers[index + 1].drained_ms if index + 1 < len(workers) else float("inf")
        room = (following - level_ms) * rate
        if room >= left:
            return max(fastest_ms, level_ms + left / rate)
        level_ms, left = following, left - room
    raise AssertionError("after the last worker there is room for everything")


TOKENS: Final = NetworkOperations([BlockSpec(linear=1.0, text=1.0)])
"""Operations of a network that nothing is known of: one operation a computed token."""
ROUNDING: Final = 1e-9
"""Makes the share k / n of n steps k again."""
UNIT: Final = StepCosts((0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
"""A millisecond an operation: workers that have told nothing are compared by the tokens that they compute."""


@dataclass(frozen=True)
class StepTimeModel:
    """A model of the cost of steps on one worker."""

    costs: StepCosts = UNIT
    operations: NetworkOperations = TOKENS
    """What the blocks of the network compute."""
    reused: BlockMode = BlockMode.KV
    """How rows take from templates there."""
    renewed_every: int = 0
    """Rows without a template compute one step in so many in full there, and of others their compute set; 0: all."""
    keeps_padding: bool = False
    """Whether most steps of rows that reuse take their prompts' padding there, instead of computing it."""
    slowness: float = 1.0
    """How many times slower this worker is than `costs`, which all workers of its kind share."""
    loading: float = 1.0
    """How many times longer than their least computing rows that reuse take, as the worker's planner expects."""
    controls: tuple[tuple[str, ControlWork], ...] = ()
    """Digests and work of the ControlNets that its process computes; others cost it nothing."""
    ways: Ways = ()
    """What steps cost that several of its devices compute together; empty of a worker with one device."""

    @cached_property
    def spread(self) -> Mapping[StepParallelism, StepTimeModel]:
        """The same worker's pace in steps of each of these ways."""
        return {way: replace(self, costs=costs, ways=()) for way, costs in self.ways}

    @property
    def base_ms(self) -> float:
        """Time of a forward without any row, and so of a step."""
        return self.slowness * self.costs.call_ms

    @property
    def whole_ms(self) -> float:
        """Time that a step in full of a row that reuses takes beyond the row's own: 0, or that of another forward.

        Where blocks are taken together, rows in full are not computed with rows that take.
        """
        return self.base_ms if self.operations.together else 0.0

    @cached_property
    def _rates(self) -> tuple[float, ...]:
        """Milliseconds of each of :meth:`SequenceShape.amounts` in all blocks."""
        rates: list[float] = (self.slowness * self.costs.rates(self.operations).sum(0)).tolist()
        return tuple(rates)

    def row_ms(self, shape: RowShape, mode: BlockMode) -> float:
        """Time that a row adds to a step."""
        added: float = sum(map(mul, self._rates, shape.amounts(mode)))
        return shape.sequences * added

    def controlled(self, shape: RowShape, controls: Iterable[NeededControl]) -> RowShape:
        """`shape` with what these ControlNets compute here, spread over its steps."""
        work = dict(self.controls)
        picture = shape.image - shape.companions
        added = sum(
            net.share
            * control_work(work[net.digest], text=shape.text, image=picture, sequences=shape.sequences)
            for net in controls
            if net.digest in work
        )
        return replace(shape, control=added) if added else shape


@dataclass(frozen=True, slots=True)
class RowShape(SequenceShape):
    """One row, as far as its cost depends on it; its compute set counts where the template is at hand.

    Its padding counts where the worker keeps it, in steps that compute the compute set.
    """

    steps: int
    """Still to compute."""
    sequences: int = 1
    """2 with true classifier-free guidance."""
    begun: bool = False
    """Whether its next step is like the others: it has made one where it is, or knows what that would teach."""
    companions: int = 0
    """Image tokens beside the picture's; `image` counts them too."""
    skipped: int = 0
    """Steps that are extrapolated, as far as that is known before; what they save is spread over all."""

    def load(self, pace: StepTimeModel, *, reuses: bool, renewed_every: int = 0) -> RowLoad:
        """Return what the row adds to steps of a worker of this pace.

        It takes from a template, or what one step in full in so many makes (0: none does), or computes everything.
        """
        load = self._of_computed(pace, reuses=reuses, renewed_every=renewed_every)
        if not self.skipped:
            return load
        return load._replace(step_ms=load.step_ms * (1 - self.skipped / self.steps))

    def _of_computed(self, pace: StepTimeModel, *, reuses: bool, renewed_every: int) -> RowLoad:
        """:meth:`load` of a row that computes all of its steps."""
        unpadded = self if pace.keeps_padding else self.whole
        full_ms = pace.row_ms(self.whole, BlockMode.FULL)
        tokens = self.sequences * (self.text + self.image)
        prefix = 0 if self.begun else self.sequences * self.prefix
        joining_ms = pace.row_ms(self.joining, BlockMode.FULL) if prefix else 0.0
        whole = RowLoad(self.steps, full_ms, joining_ms, tokens, prefix)
        if not (reuses or renewed_every) or self.computed >= self.image:
            return whole
        mode, loading = (pace.reused, pace.loading) if reuses else (BlockMode.KV, 1.0)
        masked_ms = loading * pace.row_ms(unpadded, mode)
        if masked_ms >= full_ms:  # above the crossover the worker does not reuse
            return whole
        masked = self.sequences * (unpadded.live_text + self.computed)
        if not reuses:  # steps in full are spread over the others
            share = self._renewals(renewed_every)
            masked_ms += share * (full_ms + pace.whole_ms - masked_ms)
            masked += round(share * (tokens - masked))
        if self.begun:
            return RowLoad(self.steps, masked_ms, tokens=masked)
        first_ms = joining_ms + full_ms + pace.whole_ms - masked_ms
        return RowLoad(self.steps, masked_ms, first_ms, masked, prefix + tokens - masked)

    @property
    def joining(self) -> RowShape:
        """Its prefix, as a picture of its own without text: computed where it makes its first step."""
        return replace(self, text=0, padding=0, prefix=0, image=self.prefix, computed=self.prefix)

    @property
    def whole(self) -> RowShape:
        """The same row in a step in full, which computes padding too."""
        return replace(self, padding=0) if self.padding else self

    def _renewals(self, every: int) -> float:
        """Share of steps in full among the steps to come, the first one of a row that has not begun aside."""
        if self.begun:
            return 1 / every
        return (math.ceil(self.steps / every) - 1) / max(1, self.steps - 1)


@dataclass(frozen=True, slots=True)
class JobDemand:
    """The demand of a job on a worker."""

    model: str
    model_digest: str
    shapes: tuple[RowShape, ...]
    template: str | None = None
    """Picture whose recording they may take from; None where they do not reuse."""
    ticket: int = 0
    """Counts jobs in order of arrival."""
    renews: bool = False
    """Where no template is at hand, its rows may take what their own steps in full make."""
    within_ms: float | None = None
    """Time from now in which the client wants the rows computed."""
    together: bool = False
    """Its rows go to one worker; otherwise they may be computed by several."""
    alone: bool = False
    """It goes to an empty worker: it is suspected of having brought others down."""
    adapters: tuple[NeededLora, ...] = ()
    joins_within: float = 0.0
    """Share of their steps that its rows may make before their adapters are there; 0: they wait for them, `exact`."""
    controls: tuple[NeededControl, ...] = ()

    def piece(self) -> JobDemand:
        """Return what is placed at once: the first row, or all rows where they stay together."""
        whole = self.together or self.alone or len(self.shapes) == 1
        return self if whole else replace(self, shapes=self.shapes[:1])

    @property
    def rows(self) -> int:
        """Rows that are still to be computed."""
        return len(self.shapes)

    @property
    def computed(self) -> int:
        """Image tokens that all rows compute where their template is at hand."""
        return sum(shape.computed for shape in self.shapes)

    @property
    def steps(self) -> int:
        """Row steps: the sum over rows of the steps still to compute."""
        return sum(shape.steps for shape in self.shapes)

    @property
    def needing(self) -> float:
        """Share of their steps for which its rows need their adapters; they join after whole steps."""
        most = max(shape.steps for shape in self.shapes)
        return 1 - int(self.joins_within * most + ROUNDING) / most

    @property
    def size(self) -> float:
        """Token steps, to compare what jobs ask for."""
        return float(sum((row.text + row.computed) * row.sequences * row.steps for row in self.shapes))

    def fits(self, rows: int, capacity_rows: int) -> bool:
        """Whether a worker with so many rows can take it now; one without any can, since the largest job must run."""
        return rows == 0 or (not self.alone and rows + self.rows <= capacity_rows)

    def loads(self, pace: StepTimeModel, *, reuses: bool) -> tuple[RowLoad, ...]:
        """Return what its rows add to steps of a worker of this pace."""
        hit = reuses and self.template is not None
        most = pace.renewed_every if self.renews and not hit else 0
        return tuple(
            pace.controlled(shape, self.controls).load(
                pace, reuses=hit, renewed_every=refresh_interval(shape.steps, most)
            )
            for shape in self.shapes
        )


def computed_tokens(row: RowProgress) -> int:
    """Image tokens that its next step computes, companions among them, unless that is its first."""
    if row.computed_tokens is None:
        return row.tokens + row.companion_tokens
    return row.computed_tokens


def remaining_steps(row: RowProgress) -> int:
    """Steps still to compute, at least 1."""
    return max(1, row.steps - row.step)


def is_reusing(row: RowProgress) -> bool:
    """Return whether it takes from a template, and not what its own steps in full make."""
    return computed_tokens(row) < row.tokens + row.companion_tokens and not row.renewed_every


def shape_of(row: RowProgress) -> RowShape:
    """Return what it computes."""
    return RowShape(
        row.text_tokens,
        row.tokens + row.companion_tokens,
        computed_tokens(row),
        remaining_steps(row),
        row.sequences,
        row.begun,
        padding=row.padding_tokens,
        prefix=row.prefix_tokens,
        low_rank=row.low_rank,
        skipped=min(row.skipped_steps, remaining_steps(row) - 1),
        segments=1 / row.sequences if row.low_rank else 0.0,
        control=row.control,
    )
