"""The planner of a step: what each sequence takes from a template and records, and what is loaded in which order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from giornata.packed.tracing import Tracing
from giornata.packed.uses import Use, by_sequence
from giornata.planning.costs import Shape, StepCosts, Work, step_work
from giornata.scheduling.batch import RowKey
from giornata.wire.values import Mode
from giornata_denoiser.blocks.correction import Correction
from giornata_denoiser.blocks.loads import SlabLoad
from giornata_denoiser.blocks.slabs import Slabs, Waits
from giornata_denoiser.engine.options import ReuseOptions
from giornata_denoiser.engine.running import Running
from giornata_denoiser.engine.served import Served, planned, preferred
from giornata_denoiser.engine.weighing import predicted_ms, reuses
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import Entry


@dataclass(frozen=True)
class StepPlan:
    """What one step takes and records."""

    uses: tuple[Use, ...]
    """The use of each sequence of the batch; positive sequences come first."""
    work: Work
    """What the step computes, over all blocks."""
    predicted_ms: float
    reusing_ms: float
    """The part of it that rows which take from templates compute at least."""
    excess_ms: float
    """The part of it beyond the least of all rows."""
    missing_bytes: int
    """What the step takes and had not been loaded when it began."""


class Sources:
    """Plans steps over the running rows, and has their slabs loaded.

    Args:
        family: computes the rows.
        options: how rows take from templates.
        waits: told how long blocks wait for slabs.
        trace: told of every load.
    """

    def __init__(self, family: ModelFamily, options: ReuseOptions, waits: Waits, trace: Tracing) -> None:
        self._family, self._options, self._waits, self._trace = family, options, waits, trace
        self._running: dict[RowKey, Running] = {}
        self._shared: WeakValueDictionary[tuple[object, ...], Slabs] = WeakValueDictionary()

    def retain(self, keys: Collection[RowKey]) -> None:
        """Forget all rows but these."""
        for key in self._running.keys() - keys:
            del self._running[key]

    def step(self, rows: Sequence[Row]) -> StepPlan:
        """Plan the next step of the batch of `rows`, and begin to load what it takes."""
        running = [self._advanced(row) for row in rows]
        costs = self._options.model.costs
        if self._options.loader is not None:
            self._look_ahead(running)
        planned_ms = self._plan(running, costs)
        work = step_work(*self._computed(running))
        missing = sum(each.served.missing_bytes for each in running if each.served is not None)
        if self._options.loader is not None:
            self._options.loader.schedule(_loads(running))
        expected_ms = max(planned_ms, costs.step_ms(work))
        least_ms, reusing_ms = self._least(rows, costs)
        return StepPlan(
            by_sequence([each.uses(self._family.depth) for each in running]),
            work,
            expected_ms,
            reusing_ms,
            max(0.0, expected_ms - least_ms),
            missing,
        )

    def _advanced(self, row: Row) -> Running:
        running = self._running.get(row.key)
        if running is None or not running.is_of(row):
            running = Running(row, self._slabs, self._options.correction_bits)
            self._running[row.key] = running
        running.advance(row)
        return running

    def _look_ahead(self, rows: Iterable[Running]) -> None:
        """What serves the rows next is loaded ahead, as far as there is room."""
        room = self._options.ahead_bytes
        for each in rows:
            entry = each.following
            if entry is None:
                continue
            if each.next is None or each.next.entry is not entry:
                each.next = each.made(entry)
            room -= each.next.size_bytes
            if room < 0:
                each.next = None

    def _plan(self, rows: Sequence[Running], costs: StepCosts) -> float:
        """Choose the modes of rows whose modes may still change; the step's predicted end in ms, 0 if none may."""
        open_ = [(each, served) for each in rows if (served := each.plannable) is not None]
        if not open_:
            return 0.0
        now = [served for _, served in open_]
        device = self._options.device
        beside = step_work(*self._computed(each for each in rows if each.plannable is None))
        chosen, ended_ms = planned(
            now,
            [each.next if each.changes else None for each, _ in open_],
            costs,
            self._options.planner,
            # Costs of the step itself are spread over its blocks: time that loads may hide behind.
            beside_ms=costs.step_ms(beside) / self._family.depth,
            busy_ms=costs.load_ms(self._busy_bytes(now)),
            shared=device is not None and device.shares,
        )
        for (each, _), served in zip(open_, chosen, strict=True):
            each.served = served
        return ended_ms

    def _busy_bytes(self, planned_for: Sequence[Served]) -> int:
        """Bytes of a load that has begun for others, or for later: the link is not free before."""
        load = None if self._options.loader is None else self._options.loader.under_way
        if load is None or any(load.slabs in served.slabs for served in planned_for):
            return 0
        return load.slabs.load_bytes(load.block, load.mode)

    def _computed(self, rows: Iterable[Running]) -> tuple[list[Shape], list[tuple[Mode, ...]]]:
        """The shapes of all sequences of `rows` and the modes of their blocks."""
        full = (Mode.FULL,) * self._family.depth
        computed = [
            (shape, full if each.served is None else each.served.computed)
            for each in rows
            for shape in each.row.shapes
        ]
        return [shape for shape, _ in computed], [modes for _, modes in computed]

    def _least(self, rows: Sequence[Row], costs: StepCosts) -> tuple[float, float]:
        """Milliseconds of a step of `rows` that waits for no load; the part of rows that take from templates."""
        base_ms = costs.compute[0]
        each_ms = [predicted_ms([row], costs, self._family.depth) - base_ms for row in rows]
        reusing_ms = sum(ms for row, ms in zip(rows, each_ms, strict=True) if reuses(row))
        return base_ms + sum(each_ms), reusing_ms

    def _slabs(self, row: Row, entry: Entry, own: int, correction: Correction | None) -> Slabs:
        """The slabs of another sequence, if nothing of them is the row's own: neither now nor once it is corrected."""
        if row.region is None:
            raise ValueError(f"row {row.key} computes everything")
        key = id(entry), row.region.digest, own
        shareable = self._options.correction_bits is None
        found = self._shared.get(key) if shareable else None
        if found is None:
            found = Slabs(
                entry,
                row.region,
                own,
                self._family,
                device=self._options.device,
                waits=self._waits,
                trace=self._trace,
                correction=correction,
            )
            if shareable:
                self._shared[key] = found
        return found


def _loads(rows: Sequence[Running]) -> Iterator[SlabLoad]:
    """Loads in the order of their use: this step's, what it did without and the next step can use, later ones."""
    now = [each.served for each in rows if each.served is not None]
    yield from _in_order(now)
    yield from _in_order(
        replace(each.served, modes=preferred(each.served.entry))
        for each in rows
        if each.served is not None and not (each.served.final or each.changes)
    )
    yield from _in_order(each.next for each in rows if each.next is not None)


def _in_order(served: Iterable[Served]) -> Iterator[SlabLoad]:
    """Loads in the order in which blocks ask for them."""
    every = list(served)
    for block in range(max((len(each.modes) for each in every), default=0)):
        for each in every:
            yield from each.load(block)
