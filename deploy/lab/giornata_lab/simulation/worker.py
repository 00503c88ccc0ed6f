"""A simulated denoiser: the live batch around a virtual step, templates, telemetry. Pure.

Steps of the same rows are alike, so the clock jumps over them: something happens only where a row joins, leaves or
takes its first step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Final

from giornata.scheduling.batch import BatchingMode, Capacity, RowBatch, RowKey
from giornata.scheduling.demand import JobDemand, RowShape
from giornata.scheduling.placement import TemplateRunPolicy
from giornata.scheduling.worker_state import Attempt
from giornata.wire.workers import AdapterLoad, LoadSample, StepSample, Tier, WorkerState
from giornata_lab.simulation.jobs import (
    EPSILON_S,
    EqualStepRun,
    SimAssignment,
    SimRow,
    StepTimes,
    progress,
    row_of,
    sample,
)
from giornata_lab.simulation.machines import Machine
from giornata_lab.simulation.residency import (
    AdapterSetting,
    SimClock,
    SimHost,
    SimLoras,
    SimTemplates,
    TemplateSetting,
)
from giornata_lab.simulation.results import WorkerCounters

SAMPLES: Final = 16
"""Most samples of steps in one telemetry message."""
LEVELS: Final = 6
"""Steps of a run that records a template."""


class SimWorker:
    """One denoiser; `done` is called when the rows of a piece are computed."""

    def __init__(
        self,
        name: str,
        machine: Machine,
        templates: TemplateSetting,
        *,
        clock: SimClock,
        done: Callable[[SimAssignment, float], None],
        adapters: AdapterSetting | None = None,
        shared: SimHost | None = None,
        batching: BatchingMode = BatchingMode.STEP,
    ) -> None:
        self.name, self.machine = name, machine
        self.counted = WorkerCounters()
        self._templates, self._clock, self._done = templates, clock, done
        self._pace = machine.pace
        self._times = StepTimes(self._pace, templates.kv_bytes)
        self.batch: RowBatch[SimRow] = RowBatch(Capacity(machine.rows, machine.tokens), joining=batching)
        self._loads: list[LoadSample] = []
        self._kept = SimTemplates(templates, machine.storage, clock, self._loads.append)
        self._admission = TemplateRunPolicy()
        self._runs: set[str] = set()
        self._adapter_loads: list[AdapterLoad] = []
        self.loras = SimLoras(adapters or AdapterSetting(), clock, self._adapter_loads.append, shared)
        self.counted.lora_hits, self.counted.loaded = self.loras.hits, self.loras.loaded
        self._unfinished: dict[Attempt, tuple[SimAssignment, int]] = {}
        """With how many of its rows are not computed."""
        self._queue = deque[SimAssignment]()
        """Not prepared yet."""
        self._on_turn = (adapters or AdapterSetting()).on_turn
        self._fetching: dict[Attempt, SimAssignment] = {}
        self._segment: EqualStepRun | None = None
        self._numbers = count()
        self._samples: deque[StepSample] = deque(maxlen=SAMPLES)
        self._told = WorkerState(
            capacity_rows=machine.rows,
            capacity_tokens=machine.tokens,
            blocks=machine.operations.specs,
            cost_model=machine.told,
            adapter_lanes=1,
        )
        self._changed = True
        self._arrivals = 0
        """Arrivals of adapters when telemetry was told last."""

    def take(self, piece: SimAssignment, now: float) -> None:
        """Take assigned rows: look for their template; they join as soon as they can."""
        self._changed = True
        self._unfinished[piece.key] = piece, len(piece.rows)
        self._queue.append(piece)
        self._take_turns(now)

    def _take_turns(self, now: float) -> None:
        """Prepare rows in the order in which they came; where adapters are loaded on turn, once there is a place."""
        while self._queue:
            fetching = sum(len(piece.rows) for piece in self._fetching.values())
            taken = fetching + len(self.batch.running) + len(self.batch.waiting)
            if self._on_turn and taken >= self.machine.rows:
                return
            self._prepare(self._queue.popleft(), now)

    def _prepare(self, piece: SimAssignment, now: float) -> None:
        """Look for the rows' template, and load their adapters."""
        demand = piece.job.demand
        tier, ready_s = self._look_up(demand, now)
        template = demand.template if tier else None
        if demand.adapters:
            self.loras.hold(piece.key, demand.adapters)
            loras_s = self.loras.ready_s(demand.adapters, now) - self._without_s(demand)
            exposed_s = max(0.0, loras_s - max(now, ready_s))
            self.counted.waits.append((now, exposed_s, len(demand.adapters)))
            ready_s = max(loras_s, ready_s)
        if ready_s <= now:
            self._submit(piece, template, now)
        else:
            self._fetching[piece.key] = piece
            self._clock.at(ready_s, lambda then: self._ready(piece, template, then))

    def _without_s(self, demand: JobDemand) -> float:
        """Time of the steps that rows may make before their adapters are there, beside the rows that run."""
        if not demand.joins_within:
            return 0.0
        own_ms = demand.loads(self._pace, reuses=False)[0].step_ms
        step_ms = self._pace.base_ms + own_ms + sum(row.step_ms for row in self.batch.running)
        return demand.joins_within * max(shape.steps for shape in demand.shapes) * step_ms / 1e3

    def _look_up(self, demand: JobDemand, now: float) -> tuple[Tier | None, float]:
        """Return where the template of a job is, and when it is in memory; it is recorded if it comes often."""
        template = demand.template
        if template is None:
            return None, now
        tier, ready_s = self._kept.find(template, now)
        self.counted.hits[tier] += 1
        if tier is None and self._admission.see(template, registered=False):
            self._record(template, demand.shapes[0])
        return tier, ready_s

    def state(self, now: float) -> WorkerState | None:
        """Telemetry; None where nothing has changed since the last message."""
        arrivals, self._arrivals = self._arrivals, self.loras.arrivals
        if not (self._changed or self._unfinished or self._segment or arrivals < self._arrivals):
            return None
        self._changed = False
        made = self._segment.made(now) if self._segment is not None else 0
        running = tuple(progress(row, made) for row in self.batch.running)
        waiting = tuple(progress(row, 0) for row in self.batch.waiting)
        fetching = tuple(
            progress(row, 0)
            for piece in (*self._fetching.values(), *self._queue)
            for row in self._rows(piece, piece.job.demand.template)
        )
        samples, loads = tuple(self._samples), tuple(self._loads[-SAMPLES:])
        news = {"running": running, "waiting": waiting + fetching, "samples": samples, "loads": loads}
        kept = {
            "adapter_loads": tuple(self._adapter_loads[-SAMPLES:]),
            "adapters_resident": self.loras.resident(),
            "adapters": self.loras.counted(),
            "resident": self._kept.resident(),
            "templates": self._kept.counted(),
        }
        for told in (self._samples, self._loads, self._adapter_loads):
            told.clear()
        return self._told.model_copy(update={**news, **kept})

    def _rows(self, piece: SimAssignment, template: str | None) -> list[SimRow]:
        demand, pace = piece.job.demand, self._pace
        shapes = [pace.controlled(shape, demand.controls) for shape in demand.shapes]
        return [
            row_of(RowKey(*piece.key, index), shapes[index], pace, template=template) for index in piece.rows
        ]

    def _ready(self, piece: SimAssignment, template: str | None, now: float) -> None:
        if self._fetching.pop(piece.key, None) is not None:  # else it was dropped meanwhile
            self._submit(piece, template, now)

    def _record(self, template: str, shape: RowShape) -> None:
        if template in self._runs:
            return
        self._runs.add(template)
        whole = RowShape(shape.text, shape.image, shape.image, LEVELS, begun=True, padding=shape.padding)
        key = RowKey(template, 0, next(self._numbers))
        self.batch.submit([row_of(key, whole, self._pace, template=None, background=True)])

    def _submit(self, piece: SimAssignment, template: str | None, now: float) -> None:
        blocked = bool(self.batch.waiting) or len(self.batch.running) >= self.machine.rows
        self.batch.submit(self._rows(piece, template))
        if self._segment is None:
            self._begin(now)
        elif not blocked or self.batch.background:
            self._cut(self._segment, now)

    def _cut(self, segment: EqualStepRun, now: float) -> None:
        """End the segment with the present step, since rows may join or leave."""
        if segment.steps == 1:
            return
        steps = min(segment.steps, math.ceil((now - segment.began_s - EPSILON_S) / segment.step_s))
        if steps < segment.steps:
            segment.steps, segment.number = max(1, steps), next(self._numbers)
            self._plan_end(segment)

    def _begin(self, now: float) -> None:
        rows = self.batch.admit()
        if not rows:
            return
        computing_ms, waiting_ms = self._times.step_ms(rows)
        step_s = (computing_ms + waiting_ms) / 1e3
        steps = min(row.left for row in rows)
        if self.batch.background or any(row.first for row in rows):
            steps = 1
        self._segment = EqualStepRun(rows, now, step_s, steps, next(self._numbers), waiting_ms)
        self._plan_end(self._segment)

    def _plan_end(self, segment: EqualStepRun) -> None:
        number = segment.number
        ends_s = segment.began_s + segment.steps * segment.step_s
        self._clock.at(ends_s, lambda now: self._end(segment, now) if segment.number == number else None)

    def _end(self, segment: EqualStepRun, now: float) -> None:
        self._segment, self._changed = None, True
        segment.step_s = (now - segment.began_s) / segment.steps
        self.counted.busy_s += segment.steps * segment.step_s
        self.counted.steps += segment.steps
        self.counted.row_steps += segment.steps * len(segment.rows)
        if self.machine.slowness != 1.0 or self._templates.kv_bytes:
            self._samples.extend([sample(segment, self._pace.operations)] * min(segment.steps, SAMPLES))
        for row in segment.rows:
            row.left -= segment.steps
            row.begun = True
        left = [row for row in segment.rows if row.left <= 0]
        self.batch.settle((), [row.key for row in left])
        ended = [piece for row in left if (piece := self._left(row)) is not None]
        self._take_turns(now)
        if self._segment is None:
            self._begin(now)
        for piece in ended:
            self._done(piece, now)

    def _left(self, row: SimRow) -> SimAssignment | None:
        """The piece that ends with this row, if one does."""
        if row.background:
            self._runs.discard(row.key.job_id)
            self._kept.put(row.key.job_id)
            self.counted.recorded += 1
            return None
        key = row.key.job_id, row.key.attempt
        if key not in self._unfinished:  # dropped while its step was computed
            return None
        piece, rows = self._unfinished.pop(key)
        if rows == 1:
            self.loras.release(key)
            return piece
        self._unfinished[key] = piece, rows - 1
        return None
