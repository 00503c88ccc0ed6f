"""The plan of a step: what each sequence takes and records, what is loaded in which order, and what it computes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np

from giornata.packed.compute_set import BlockInputs, by_sequence
from giornata.packed.packing import LaneTracer, to_device
from giornata.planning.batch_plans import BatchPlanner, plan_batch
from giornata.planning.operations import (
    NetworkOperations,
    SequenceShape,
    StepWork,
    is_all_or_nothing,
    mean_amounts,
    sample_fields,
    step_work,
)
from giornata.planning.step_costs import StepCosts
from giornata.scheduling.batch import RowKey
from giornata.wire.values import BlockMode
from giornata.wire.workers import StepSample
from giornata_denoiser.blocks.recorders import CorrectionRecorder, EntryRecorder, OwnKeysValues, own_bits
from giornata_denoiser.blocks.slabs import CacheSharder, Device, Slabs, WaitTimer
from giornata_denoiser.engine.loading import Loader, SlabRun
from giornata_denoiser.engine.running_row import EntryReuse, RowCacheFactories, RunningRow, plan_modes
from giornata_denoiser.engine.step_budget import predicted_work
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import Correction, Entry

# What a planned step computes, counted for the cost model and for the router's regressions. Pure.


def work_of(operations: NetworkOperations, rows: Iterable[RunningRow]) -> StepWork:
    """Return what a step of `rows` computes, over all blocks; rows of one set of LoRAs are one segment."""
    rows = tuple(rows)
    work = step_work(operations, *_sequences(operations, rows))
    sets = {each.row.adapters.acting(each.row.step) for each in rows}
    return replace(work, segments=float(len(sets - {()})))


class CountedRow(NamedTuple):
    """A row of a step: what its share of the step's work follows from."""

    running: RunningRow
    shapes: tuple[SequenceShape, ...]
    modes: tuple[BlockMode, ...]
    begun: bool
    masked: bool
    controlling: tuple[bool, ...]


class CountedStep(NamedTuple):
    """The counted work of a step: it stays while its rows compute the same."""

    rows: list[CountedRow]
    work: StepWork
    """Over all blocks."""
    fields: dict[str, Any]
    """The same for the router's regressions."""
    least: list[StepWork]
    """By row: what it computes at least, alone, in a step that waits for no load."""


def count_step(
    operations: NetworkOperations, rows: Sequence[RunningRow], last: CountedStep | None
) -> CountedStep:
    """What a step of `rows` computes; the `last` one's count where they compute the same again."""
    counted = [
        CountedRow(
            each,
            each.shapes,
            each.computed(operations.blocks),
            each.row.begun,
            each.row.masked,
            each.row.adapters.controlling(each.row.step) if each.row.adapters.controls else (),
        )
        for each in rows
    ]
    if last is not None and last.rows == counted:
        return last
    work = work_of(operations, rows)
    fields = sample_fields(work, mean_amounts(*_sequences(operations, rows)))
    return CountedStep(counted, work, fields, [predicted_work([each.row], operations) for each in rows])


def step_sample(
    operations: NetworkOperations,
    rows: Sequence[RunningRow],
    counted: CountedStep,
    costs: StepCosts,
    *,
    missing_bytes: int,
    planned_ms: float,
) -> StepSample:
    """The sample of a step of `rows` before it is measured; loads alone end it after `planned_ms`."""
    work = counted.work
    expected_ms = max(planned_ms, costs.step_ms(work))
    least_ms = [costs.step_ms(least) - costs.call_ms for least in counted.least]
    return StepSample(
        rows=len(rows),
        **counted.fields,
        blocks=round(work.sequences) * operations.blocks,
        loaded_bytes=missing_bytes,
        assemble_ms=0.0,
        step_ms=0.0,
        predicted_ms=expected_ms,
        reusing_ms=sum([ms for each, ms in zip(counted.rows, least_ms, strict=True) if each.masked]),
        excess_ms=max(0.0, expected_ms - work.calls * costs.call_ms - sum(least_ms)),
    )


def _sequences(
    operations: NetworkOperations, rows: Iterable[RunningRow]
) -> tuple[list[SequenceShape], list[tuple[BlockMode, ...]]]:
    """Shape and modes of every sequence of a step of `rows`, row by row; its prefixes follow a row's own."""
    shapes: list[SequenceShape] = []
    modes: list[tuple[BlockMode, ...]] = []
    for each in rows:
        shapes += each.shapes
        modes += [each.computed(operations.blocks)] * len(each.shapes)
        shapes += each.row.joining
        modes += [(BlockMode.FULL,) * operations.blocks] * len(each.row.joining)
    return shapes, modes


# The planner of a step: what each sequence takes from a template and records, and what is loaded in which
# order.


class CostFollower(Protocol):
    """Tells what steps cost on this machine, and learns from steps."""

    @property
    def costs(self) -> StepCosts:
        """The costs as they are known now."""

    def observe_step(self, work: StepWork, step_ms: float) -> object:
        """Take in a step that computed `work` in `step_ms` and had nothing to load."""


class UnmeasuredCostModel:
    """The costs of a machine that is not measured: computing counts tokens, loading nothing."""

    costs: Final = StepCosts((0.0, 0.0, 1.0, 1.0, 1.0, 0.0))

    def observe_step(self, work: StepWork, step_ms: float) -> None:
        """Learn nothing."""


@dataclass(frozen=True, eq=False)
class ReuseOptions:
    """The ways in which an engine reuses templates, and its costs; the benchmarks' baselines are other values."""

    loader: Loader | None = None
    """Loads ahead what rows take; without it a block's load is waited for when the block begins."""
    model: CostFollower = field(default_factory=UnmeasuredCostModel)
    planner: BatchPlanner = plan_batch
    device: Device | None = None
    """How loads get to the engine's device; None where it is the CPU."""
    ahead_bytes: int = 1 << 30
    """Most slabs that are loaded for later steps."""
    correction_bits: int | None = 8
    """Bits of corrections: a row that brings none computes its first step in full and corrects by it what it takes
    later. None corrects nothing, as FlashPS does.
    """


@dataclass(frozen=True)
class StepPlan:
    """A plan of what one step takes and records."""

    uses: tuple[BlockInputs, ...]
    """The use of each sequence of the batch; positive sequences come first."""
    work: StepWork
    """What the step computes, over all blocks."""
    sample: StepSample | None
    """The same for the router's regressions, with what is predicted; its times are 0 until they are measured. None
    where the network computes nothing."""
    learning: tuple[tuple[CorrectionRecorder, ...], ...]
    """By row: the recorders that learn its corrections in this step, one a sequence; empty where it learns none."""
    recording: tuple[EntryRecorder | None, ...]
    """By row: what it leaves behind of this step; None for nothing."""

    def beside(self, skipped_blocks: int) -> StepPlan:
        """The same beside rows that are not computed, and so many blocks of theirs."""
        if self.sample is None:
            return self
        told = self.sample.skipped_blocks + skipped_blocks
        return replace(self, sample=self.sample.model_copy(update={"skipped_blocks": told}))


class StepPlanner:
    """Plans steps over the running rows, and has their slabs loaded; `waits` hears how long blocks wait for slabs."""

    def __init__(
        self, family: ModelFamily, options: ReuseOptions, waits: WaitTimer, trace: LaneTracer
    ) -> None:
        self._family, self._options, self._waits, self._trace = family, options, waits, trace
        self.blocks = family.depth
        """Of the network."""
        self._narrowing = CacheSharder(family)
        self._make = RowCacheFactories(self._slabs, self._own, self._padding, self._entry, self._narrowing)
        self._running: dict[RowKey, RunningRow] = {}
        self._counted: CountedStep | None = None
        self._scheduled: list[tuple[object, ...]] = []
        """What the loader's queue follows from, by row."""
        self._shared: WeakValueDictionary[tuple[object, ...], Slabs] = WeakValueDictionary()

    def retain(self, keys: Collection[RowKey]) -> None:
        """Forget all rows but these."""
        for key in self._running.keys() - keys:
            del self._running[key]
            self._counted = None

    def rest(self) -> None:
        """Forget all rows, and load nothing more for them."""
        self._running.clear()
        self._counted, self._scheduled = None, []
        if self._options.loader is not None:
            self._options.loader.schedule(())

    def give_back(self) -> None:
        """As :meth:`rest`, and keep none of what the device has of templates: it is brought again when it is taken."""
        self.rest()
        if self._options.device is not None:
            self._options.device.give_back()

    def step(self, rows: Sequence[Row]) -> StepPlan:
        """Plan the next step of the batch of `rows`, and begin to load what it takes."""
        running = [self._advanced(row) for row in rows]
        costs, loader = self._options.model.costs, self._options.loader
        if loader is not None:
            self._look_ahead(running)
        planned_ms = self._plan(running, costs)
        operations = self._family.operations
        counted = self._counted = count_step(operations, running, self._counted)
        missing = sum([each.missing_bytes for each in running])
        if loader is not None and self._scheduled != (wanted := [each.wanted for each in running]):
            loader.schedule(_loads(running))
            self._scheduled = wanted
        sample = step_sample(
            operations, running, counted, costs, missing_bytes=missing, planned_ms=planned_ms
        )
        return StepPlan(
            by_sequence([each.uses(operations.blocks) for each in running]),
            counted.work,
            sample,
            tuple([() if each.served is None else each.served.learning for each in running]),
            tuple([each.recorder for each in running]),
        )

    def _advanced(self, row: Row) -> RunningRow:
        if row.joins_loras:  # what was learned without them corrects nothing any more
            row = replace(row, corrections=None)
        running = self._running.get(row.key)
        if row.corrections is not None and (
            running is None or row.corrections is not running.row.corrections
        ):
            row = self._narrowing.fitting(row)
        if running is None or not running.is_of(row):
            # Members of a group plan alike: none looks at what happens to be loaded at it.
            fixed = is_all_or_nothing(self._family.specs) or bool(self._family.group)
            running = RunningRow(row, self._make, self._options.correction_bits, together=fixed)
            self._running[row.key] = running
        running.advance(row)
        return running

    def _look_ahead(self, rows: Sequence[RunningRow]) -> None:
        """Return what serves the rows next is loaded ahead, as far as there is room: the first blocks of all rows."""
        for each in rows:
            entry = each.following
            if entry is not None and (each.next is None or each.next.entry is not entry):
                each.next, each.ahead = each.made(entry), 0
        if not [each for each in rows if each.next]:
            for each in rows:
                each.ahead = 0
            return
        ahead = _fitting([each.next for each in rows], self._family.depth, self._options.ahead_bytes)
        for each, blocks in zip(rows, ahead, strict=True):
            if each.next is not None and blocks < each.ahead:  # rows have joined: what is loaded beyond goes
                each.next = each.made(each.next.entry)
            each.ahead = blocks

    def _plan(self, rows: Sequence[RunningRow], costs: StepCosts) -> float:
        """Choose the modes of rows whose modes may still change; the step's predicted end in ms, 0 if none may."""
        open_ = [(each, served) for each in rows if (served := each.plannable) is not None]
        if not open_:
            return 0.0
        now = [served for _, served in open_]
        device = self._options.device
        beside = work_of(self._family.operations, [each for each in rows if each.plannable is None])
        chosen, ended_ms = plan_modes(
            now,
            [each.next if each.changes else None for each, _ in open_],
            costs,
            self._family.operations,
            self._options.planner,
            # Costs of the step itself are spread over its blocks: time that loads may hide behind.
            beside_ms=costs.step_ms(beside) / self._family.depth,
            busy_ms=costs.load_ms(self._busy_bytes(now)),
            shared=device is not None and device.shares,
        )
        for (each, _), served in zip(open_, chosen, strict=True):
            each.served = served
        return ended_ms

    def _busy_bytes(self, planned_for: Sequence[EntryReuse]) -> int:
        """Bytes of a load that has begun for others, or for later: the link is not free before."""
        load = None if self._options.loader is None else self._options.loader.under_way
        if load is None or any(load.slabs in served.slabs for served in planned_for):
            return 0
        return load.slabs.load_bytes(load.block, load.mode)

    def _own(self, row: Row, own: int) -> OwnKeysValues:
        if row.region is None:
            raise ValueError(f"row {row.key} computes everything")
        return OwnKeysValues(row.region.on(self._family.device).outside, own, self._own_bits)

    def _entry(self, row: Row) -> EntryRecorder:
        if row.records is None or self._family.group:
            raise ValueError(f"row {row.key} records nothing, or in a group: one device records alone")
        picture, device = None, self._family.device
        if row.background and not self._family.network.blends:
            latent, noise = (to_device(part, device) for part in (row.latent, row.conditioning["noise"]))
            picture = row.track.picture(latent, noise, row.step)
        return EntryRecorder(row.level, self._family.depth, row.records, picture)

    def _padding(self) -> OwnKeysValues:
        return OwnKeysValues(None, 0, self._own_bits)

    @property
    def _own_bits(self) -> int | None:
        """Bits of what rows keep of their own steps; None as blocks read it."""
        keeps = self._options.device is None or self._options.device.keeps
        return None if keeps else own_bits(self._options.correction_bits)

    def _slabs(self, row: Row, entry: Entry, own: int, correction: Correction | None) -> Slabs:
        """The slabs of another sequence, if nothing of them is the row's own.

        Rows that share a correction share what it has been added to. A row that is yet to learn its own shares nothing:
        it writes its own values into what it takes.
        """
        if row.region is None:
            raise ValueError(f"row {row.key} computes everything")
        key = id(entry), row.region.digest, own, id(correction)
        found = self._shared.get(key)
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
            if self._options.correction_bits is None or correction is not None:
                self._shared[key] = found
        return found


def _fitting(served: Sequence[EntryReuse | None], blocks: int, room_bytes: int) -> list[int]:
    """Return how many blocks of each fit into the room of all, one block of all after the other."""
    some = [index for index, each in enumerate(served) if each is not None]
    sizes = np.array([each.block_bytes for each in served if each is not None], np.int64).reshape(-1, blocks)
    used = np.cumsum(sizes.T).reshape(blocks, -1)
    fitting = [0] * len(served)
    for index, fits in zip(some, (used <= room_bytes).sum(axis=0).tolist(), strict=True):
        fitting[index] = fits
    return fitting


def _loads(rows: Sequence[RunningRow]) -> Iterator[list[SlabRun]]:
    """Loads in the order of their use: this step's, what it did without and the next step can use, later ones."""
    now = [each.served for each in rows if each.served is not None]
    missed = [
        replace(each.served, modes=each.served.entry.modes)
        for each in rows
        if each.served is not None and not (each.served.final or each.changes)
    ]
    for group in (now, missed):
        yield [run for served in group for run in served.runs()]
    yield [run for each in rows if each.next is not None for run in each.next.runs(each.ahead)]
