"""The plan of a step: what each sequence takes and records, what is loaded in which order, and what it computes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np

from giornata.packed.attention import CachedKVRecorder
from giornata.packed.packing import BlockInputs, CachedTokens, LaneTracer, by_sequence, to_device
from giornata.planning.operations import (
    SLABS,
    BatchRow,
    BlockLoads,
    Counts,
    LoadLink,
    NetworkOperations,
    SequenceShape,
    StepCosts,
    StepWork,
    is_all_or_nothing,
    row_blocks,
    sample_fields,
    slab_unit,
    step_work,
    takes,
)
from giornata.planning.plans import BatchPlanner, plan_batch
from giornata.scheduling.batch import RowKey
from giornata.wire.values import BlockMode
from giornata.wire.workers import StepSample
from giornata_denoiser.engine.loading import Loader, SlabRun
from giornata_denoiser.engine.recorders import CorrectionRecorder, EntryRecorder, OwnKeysValues, Recorders
from giornata_denoiser.engine.slabs import CacheSharder, Device, Slabs, WaitTimer
from giornata_denoiser.engine.step_budget import own_bits, predicted_work
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import Correction, Entry


@dataclass(frozen=True, eq=False)
class EntryReuse:
    """A row that takes from one entry: the slabs and shapes of its sequences, and its modes."""

    entry: Entry
    slabs: tuple[Slabs, ...]
    shapes: tuple[SequenceShape, ...]
    modes: tuple[BlockMode, ...]
    """The mode of every block; until they are planned, the cheapest of what the block kept."""
    final: bool = False
    """Nothing that is still to be loaded would change the modes."""
    learning: tuple[CorrectionRecorder, ...] = ()
    """One of each sequence, in a step that is computed in full to learn their corrections."""
    step: int = 0
    """The row's step when it was to learn."""

    @cached_property
    def block_bytes(self) -> Counts:
        """(blocks,) bytes of the slabs that each block's mode takes."""
        _, kv, hidden = takes(self.modes)
        sizes = [
            kv * each.sizes(BlockMode.KV) + hidden * each.sizes(BlockMode.HIDDEN) for each in self._distinct
        ]
        return sum(sizes[1:], sizes[0])

    @property
    def missing_bytes(self) -> int:
        """Bytes that have to move for the modes."""
        _, kv, hidden = takes(self.modes)
        return sum(
            int(kv @ each.moving(BlockMode.KV)) + int(hidden @ each.moving(BlockMode.HIDDEN))
            for each in self._distinct
        )

    def loads(self) -> BlockLoads:
        """Return what every block's modes would have to move."""
        kept = self.entry.channels
        hidden, kv = (
            np.sum([slabs.moving(mode) for slabs in self._distinct], axis=0)
            for mode in (BlockMode.HIDDEN, BlockMode.KV)
        )
        return BlockLoads(hidden, kv, kept[BlockMode.HIDDEN] > 0, kept[BlockMode.KV] > 0)

    def runs(self, blocks: int | None = None) -> Iterator[SlabRun]:
        """Return what the modes of the first `blocks`, or of all, take, whether it is here or not."""
        forms = takes(self.modes).forms
        return (SlabRun(slabs, forms, len(forms) if blocks is None else blocks) for slabs in self._distinct)

    @cached_property
    def _distinct(self) -> tuple[Slabs, ...]:
        """Each once, where sequences share them."""
        return tuple(dict.fromkeys(self.slabs))


class RunningRow:
    """All that one row has at the planner, from the step in which it joins until it leaves."""

    def __init__(self, row: Row, planner: StepPlanner) -> None:
        self.row = row
        """At its present step."""
        self.served: EntryReuse | None = None
        """What serves the present step from its template."""
        self.next: EntryReuse | None = None
        """What is loaded ahead: the next entry that is not the present one."""
        self.ahead = 0
        """How many of its blocks, from the first one."""
        self.full = True
        """Whether the present step computes the whole picture, without regard to costs."""
        self.shapes = row.shapes
        """Shapes of the row's sequences in the present step."""
        self.recorder: EntryRecorder | None = None
        """Records the present step, if the row leaves that behind."""
        self._complete: tuple[Slabs, ...] | None = None
        """Slabs of which everything that the row takes has been found to be here."""
        self._planner = planner
        self._entries = tuple(map(planner.sharder.entry, _entries(row)))
        self._after = tuple(
            next((after for after in self._entries[step + 1 :] if after not in (None, now)), None)
            for step, now in enumerate(self._entries)
        )
        """By step: the next entry that is not its own."""
        self._inputs: tuple[tuple[object, ...], tuple[BlockInputs, ...]] = ((), ())
        """What the last step's inputs were of, and these inputs."""
        self._own = [planner.own_cache(row, own) for own in row.own_tokens] if row.renews else None
        """By sequence: the keys and values that its last step in full has made, of a row that takes these."""
        self._padding = (
            [planner.padding_cache() if tokens else None for tokens in row.padding]
            if any(row.padding)
            else None
        )
        """By sequence: the keys and values of its prompt's padding; None for a prompt without."""
        self._renewed_at = self._padded_at = -1
        """The steps that last made these. One that failed may have made a part: it makes them again."""
        self._takes_padding = False

    def is_of(self, row: Row) -> bool:
        """Return whether `row` is this row some steps later, under the same LoRAs, and not another row of its name."""
        was = self.row
        return (
            row.inputs is was.inputs
            and row.reuse.template is was.reuse.template
            and row.reuse.renewed_every == was.reuse.renewed_every
            and (
                not (row.adapters.loras or was.adapters.loras)
                or row.adapters.acting(row.step) == was.adapters.acting(was.step)
            )
        )

    @property
    def plannable(self) -> EntryReuse | None:
        """Return what serves the step, if its modes may still change."""
        served = self.served
        return None if served is None or served.final or served.learning else served

    @property
    def missing_bytes(self) -> int:
        """Bytes that have to move for this step."""
        served = self.served
        if served is None or served.slabs is self._complete:
            return 0
        missing = served.missing_bytes
        if served.final and not missing:
            self._complete = served.slabs
        return missing

    @property
    def wanted(self) -> tuple[object, ...]:
        """Return what its loads follow from: while it stays the same, nothing else is to be loaded."""
        served, after = self.served, self.next
        now = () if served is None else (served.slabs, served.modes, served.final, bool(served.learning))
        return (*now, self.changes, self.ahead, None if after is None else after.slabs)

    @property
    def changes(self) -> bool:
        """Return whether another entry than the present one serves the next step."""
        return self._entries[self.row.step + 1] is not self._entries[self.row.step]

    @property
    def following(self) -> Entry | None:
        """The next entry that is not the present one; None while its corrections are not known."""
        learning = self.served is not None and self.served.learning
        return None if learning else self._after[self.row.step]

    def advance(self, row: Row) -> None:
        """Choose what the next step of `row` computes and what serves it; slabs that are here already stay."""
        self._serve(row)
        if self._own is None:
            self.full = self.served is None or bool(self.served.learning)
        else:
            self.full = not row.masked or not -1 < self._renewed_at < row.step
            if self.full:
                self._renewed_at = row.step
        leaves = row.records is not None and (row.background or (self._own is not None and self.full))
        self.recorder = self._planner.entry_recorder(row) if leaves else None
        if self._padding is None:
            return
        self._takes_padding = not self.full and -1 < self._padded_at < row.step
        if not self._takes_padding:
            self._padded_at = row.step
        self.shapes = row.shaped(padding_kept=self._takes_padding)
        if self.served is not None and self.served.shapes != self.shapes:
            self.served = replace(self.served, shapes=self.shapes)

    def _serve(self, row: Row) -> None:
        entry, served = self._entries[row.step], self.served
        self.row, self.served = row, None
        if entry is None:
            return
        if (
            served is not None
            and served.learning
            and (served.step == row.step or not all(slabs.keeps for slabs in served.slabs))
        ):
            # Either the step that was to teach the corrections has failed and is tried again: the slabs may hold the
            # row's own values already. Or they do not hold them, and the corrections are added from now on.
            served = None
        if self.next is not None and self.next.entry is entry:
            served, self.next = self.next, None
        if served is None or served.entry is not entry:
            served = self.reuse_of(entry)
        if served.learning:
            served = replace(served, learning=())
        teaches = self._planner.correction_bits is not None and row.reuse.corrections is None
        self.served = self._learning(served) if teaches else served

    def reuse_of(self, entry: Entry) -> EntryReuse:
        """Return what serves the row from `entry`, nothing of it loaded."""
        row, planner = self.row, self._planner
        corrections: Sequence[Correction | None] = (None,) * len(row.inputs.prompts)
        if (
            row.reuse.corrections is not None
            and row.region is not None
            and planner.correction_bits is not None
        ):
            corrections = [planner.sharder.correction(each, row.region) for each in row.reuse.corrections]
        slabs = tuple(
            planner.slabs(row, entry, own, correction)
            for own, correction in zip(row.own_tokens, corrections, strict=True)
        )
        return EntryReuse(entry, slabs, self.shapes, entry.modes, final=planner.fixed_modes)

    def uses(self, blocks: int) -> tuple[BlockInputs, ...]:
        """Return what each of the row's sequences does in a forward of so many `blocks`.

        They are the last step's objects where nothing has changed: so a batch knows that its plan stays.
        """
        of = self.served, self.recorder, self.full, self._takes_padding
        if self._inputs[0] != of:
            self._inputs = of, self._made_inputs(blocks)
        return self._inputs[1]

    def _made_inputs(self, blocks: int) -> tuple[BlockInputs, ...]:
        made = [BlockInputs()] * len(self.row.inputs.prompts)
        if not self.full:
            sources = self._own or (() if self.served is None else self.served.slabs)
            made = [BlockInputs(CachedTokens(self.modes(blocks), source)) for source in sources]
        elif self._own is not None:
            made = [BlockInputs(recorder=CachedKVRecorder(kept)) for kept in self._own]
        elif self.served is not None:
            made = [BlockInputs(recorder=recorder) for recorder in self.served.learning]
        if self.recorder is not None:
            # A row's last sequence is recorded: with classifier-free guidance the one that no prompt directs.
            own = made[-1].recorder
            both = self.recorder if own is None else Recorders(own, self.recorder)
            made[-1] = replace(made[-1], recorder=both)
        for index, kept in enumerate(self._padding or ()):
            if kept is not None and self._takes_padding:
                made[index] = replace(made[index], padding=kept)
            elif kept is not None:
                made[index] = replace(made[index], padding_recorder=CachedKVRecorder(kept))
        return tuple(made)

    def modes(self, blocks: int) -> tuple[BlockMode, ...]:
        """Return what so many blocks of the step compute."""
        if self.full:
            return (BlockMode.FULL,) * blocks
        return (BlockMode.KV,) * blocks if self.served is None else self.served.modes

    def _learning(self, served: EntryReuse) -> EntryReuse | None:
        """A step without corrections is computed in full and teaches them; None where no later step needs them."""
        bits = self._planner.correction_bits
        if bits is None or self.row.region is None:
            return served
        if not any(self._entries[self.row.step + 1 :]):
            return None
        learning = tuple(CorrectionRecorder(slabs, bits) for slabs in served.slabs)
        return replace(served, learning=learning, step=self.row.step)


def _entries(row: Row) -> tuple[Entry | None, ...]:
    """The entry of each step by its noise level, and None after the last one.

    A row without a region takes nothing.
    """
    if row.reuse.template is None or row.region is None:
        return (None,) * (row.steps + 1)
    levels = row.track.levels[: row.steps].tolist()
    return (*row.reuse.template.at_each(levels, row.reuse.tolerance), None)


class CountedStep(NamedTuple):
    """The counted work of a step: it stays while its rows compute the same."""

    rows: list[tuple[object, ...]]
    """What each row's part follows from."""
    work: StepWork
    """Over all blocks."""
    fields: dict[str, Any]
    """The same for the router's regressions."""
    least: StepWork
    """What the rows compute at least in a step that waits for no load, without the forward itself."""
    reusing: StepWork
    """The same of masked rows."""


def work_of(operations: NetworkOperations, rows: Iterable[RunningRow]) -> StepWork:
    """Return what a step of `rows` computes, over all blocks; rows of one set of LoRAs are one segment."""
    rows = tuple(rows)
    sets = {each.row.adapters.acting(each.row.step) for each in rows}
    return step_work(operations, *_sequences(operations, rows))._replace(segments=float(len(sets - {()})))


def _sequences(
    operations: NetworkOperations, rows: Iterable[RunningRow]
) -> tuple[list[SequenceShape], list[tuple[BlockMode, ...]]]:
    """Shape and modes of every sequence of a step of `rows`, row by row; its prefixes follow a row's own."""
    shapes: list[SequenceShape] = []
    modes: list[tuple[BlockMode, ...]] = []
    for each in rows:
        joining = each.row.joining
        shapes += (*each.shapes, *joining)
        modes += [each.modes(operations.blocks)] * len(each.shapes)
        modes += [(BlockMode.FULL,) * operations.blocks] * len(joining)
    return shapes, modes


def _summed(works: Sequence[StepWork]) -> StepWork:
    return StepWork(*map(sum, zip(*works, strict=True)))


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

    uses: tuple[BlockInputs, ...] = ()
    """The use of each sequence of the batch; positive sequences come first."""
    work: StepWork = field(default_factory=lambda: StepWork(calls=0))
    """What the step computes, over all blocks."""
    sample: StepSample | None = None
    """The same for the router's regressions, with what is predicted; its times are 0 until they are measured. None
    where the network computes nothing."""
    learning: dict[RowKey, tuple[CorrectionRecorder, ...]] = field(default_factory=dict)
    """The recorders that learn a row's corrections in this step, one a sequence."""
    recording: dict[RowKey, EntryRecorder] = field(default_factory=dict)
    """What a row leaves behind of this step."""


class StepPlanner:
    """Plans steps over the running rows, and has their slabs loaded; `waits` hears how long blocks wait for slabs."""

    def __init__(
        self, family: ModelFamily, options: ReuseOptions, waits: WaitTimer, trace: LaneTracer
    ) -> None:
        self._family, self._options, self._waits, self._trace = family, options, waits, trace
        self.sharder = CacheSharder(family)
        self.correction_bits = options.correction_bits
        self.fixed_modes = is_all_or_nothing(family.specs) or bool(family.group)
        """Members of a group plan alike: none looks at what happens to be loaded at it."""
        keeps = options.device is None or options.device.keeps
        self._own_bits = None if keeps else own_bits(options.correction_bits)
        """Bits of what rows keep of their own steps; None as blocks read it."""
        self._running: dict[RowKey, RunningRow] = {}
        self._counted: CountedStep | None = None
        self._scheduled: list[tuple[object, ...]] = []
        """What the loader's queue follows from, by row."""
        self._shared: WeakValueDictionary[tuple[object, ...], Slabs] = WeakValueDictionary()

    @property
    def keys(self) -> frozenset[RowKey]:
        """Rows of which something that they take is held."""
        return frozenset(self._running)

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
        costs, loader, blocks = self._options.model.costs, self._options.loader, self._family.depth
        if loader is not None:
            self._look_ahead(running)
        planned_ms = self._plan(running, costs)
        sample = self._sample(running, costs, planned_ms)
        if loader is not None and self._scheduled != (wanted := [each.wanted for each in running]):
            loader.schedule(_loads(running))
            self._scheduled = wanted
        return StepPlan(
            by_sequence([each.uses(blocks) for each in running]),
            self._counted.work if self._counted is not None else StepWork(),
            sample,
            {each.row.key: each.served.learning for each in running if each.served and each.served.learning},
            {each.row.key: each.recorder for each in running if each.recorder},
        )

    def _advanced(self, row: Row) -> RunningRow:
        if row.adapters.loras and row.joins_loras:  # what was learned without them corrects nothing any more
            row = row.corrected(None)
        running = self._running.get(row.key)
        if row.reuse.corrections is not None and (
            running is None or row.reuse.corrections is not running.row.reuse.corrections
        ):
            row = self.sharder.fitting(row)
        if running is None or not running.is_of(row):
            running = self._running[row.key] = RunningRow(row, self)
        running.advance(row)
        return running

    def _look_ahead(self, rows: Sequence[RunningRow]) -> None:
        """Choose what is loaded ahead for the rows, as far as there is room: the first blocks of all of them."""
        for each in rows:
            entry = each.following
            if entry is not None and (each.next is None or each.next.entry is not entry):
                each.next, each.ahead = each.reuse_of(entry), 0
        if not [each for each in rows if each.next]:
            for each in rows:
                each.ahead = 0
            return
        ahead = _fitting([each.next for each in rows], self._family.depth, self._options.ahead_bytes)
        for each, blocks in zip(rows, ahead, strict=True):
            if each.next is not None and blocks < each.ahead:  # rows have joined: what is loaded beyond goes
                each.next = each.reuse_of(each.next.entry)
            each.ahead = blocks

    def _plan(self, rows: Sequence[RunningRow], costs: StepCosts) -> float:
        """Choose the modes of rows whose modes may still change; the step's predicted end in ms, 0 if none may.

        Plans across the step boundary: a load that this step could wait for may be the next step's delay.
        """
        open_ = [(each, served) for each in rows if (served := each.plannable) is not None]
        if not open_:
            return 0.0
        operations, blocks, device = self._family.operations, self._family.depth, self._options.device
        loads = windows = [served.loads() for _, served in open_]
        following = [each.next if each.changes else None for each, _ in open_]
        if any(following):
            none = BlockLoads.equal(blocks, hidden_kept=False)
            windows = [
                own.then(none if after is None else after.loads())
                for own, after in zip(loads, following, strict=True)
            ]
        unit = slab_unit(windows)
        busy_ms = costs.load_ms(self._busy_bytes([served for _, served in open_]))
        link = LoadLink(costs.load[0] / SLABS + costs.load[1] * unit, busy_ms)
        shared = device is not None and device.shares  # rows of one entry load it once
        batch = [
            BatchRow(
                row_blocks(costs, operations, served.shapes, window, unit),
                id(served.entry) if shared else id(served.slabs[0]),
            )
            for (_, served), window in zip(open_, windows, strict=True)
        ]
        # Costs of the step itself are spread over its blocks: time that loads may hide behind.
        beside = work_of(operations, [each for each in rows if each.plannable is None])
        plan = self._options.planner(batch, link, costs.step_ms(beside) / blocks)
        for (each, served), modes, own in zip(open_, plan.modes, loads, strict=True):
            chosen = modes[:blocks]
            final = chosen == served.entry.modes or not own.largest_bytes  # as if everything had been loaded
            each.served = replace(served, modes=chosen, final=final)
        return plan.ended_ms[blocks - 1]

    def _busy_bytes(self, planned_for: Sequence[EntryReuse]) -> int:
        """Bytes of a load that has begun for others, or for later: the link is not free before."""
        load = None if self._options.loader is None else self._options.loader.under_way
        if load is None or any(load.slabs in served.slabs for served in planned_for):
            return 0
        return load.slabs.load_bytes(load.block, load.mode)

    def _sample(self, rows: Sequence[RunningRow], costs: StepCosts, planned_ms: float) -> StepSample:
        """Count a step of `rows`, and describe it before it is measured; loads alone end it after `planned_ms`."""
        counted = self._counted = self._count(rows)
        work, blocks = counted.work, self._family.depth
        expected_ms = max(planned_ms, costs.step_ms(work))
        return StepSample(
            rows=len(rows),
            **counted.fields,
            blocks=round(work.sequences) * blocks,
            loaded_bytes=sum([each.missing_bytes for each in rows]),
            assemble_ms=0.0,
            step_ms=0.0,
            predicted_ms=expected_ms,
            reusing_ms=costs.step_ms(counted.reusing),
            excess_ms=max(0.0, expected_ms - work.calls * costs.call_ms - costs.step_ms(counted.least)),
        )

    def _count(self, rows: Sequence[RunningRow]) -> CountedStep:
        """What a step of `rows` computes; the last one's count where they compute the same again."""
        operations, last = self._family.operations, self._counted
        masked = [each.row.masked for each in rows]
        of: list[tuple[object, ...]] = [
            (
                each,
                each.shapes,
                each.modes(operations.blocks),
                each.row.degree > 0,
                own,
                each.row.adapters.controls and each.row.adapters.controlling(each.row.step),
            )
            for each, own in zip(rows, masked, strict=True)
        ]
        if last is not None and last.rows == of:
            return last
        work = work_of(operations, rows)
        fields = sample_fields(work, *_sequences(operations, rows))
        least = [predicted_work([each.row], operations)._replace(calls=0.0) for each in rows]
        reusing = [part for part, own in zip(least, masked, strict=True) if own]
        return CountedStep(of, work, fields, _summed(least), _summed(reusing))

    def own_cache(self, row: Row, own: int) -> OwnKeysValues:
        """What a sequence that computes so many tokens keeps of a step in full."""
        if row.region is None:
            raise ValueError(f"row {row.key} computes everything")
        return OwnKeysValues(row.region.on(self._family.device).outside, own, self._own_bits)

    def padding_cache(self) -> OwnKeysValues:
        """What a sequence keeps of its prompt's padding."""
        return OwnKeysValues(None, 0, self._own_bits)

    def entry_recorder(self, row: Row) -> EntryRecorder:
        """What records the present step of a row for later edits."""
        if row.records is None or self._family.group:
            raise ValueError(f"row {row.key} records nothing, or in a group: one device records alone")
        picture, device = None, self._family.device
        if row.background and not self._family.network.blends:
            latent, noise = (
                to_device(part, device) for part in (row.latent, row.inputs.conditioning["noise"])
            )
            picture = row.track.picture(latent, noise, row.step)
        return EntryRecorder(row.level, self._family.depth, row.records, picture)

    def slabs(self, row: Row, entry: Entry, own: int, correction: Correction | None) -> Slabs:
        """The slabs of a row's entry for a sequence that computes so many tokens, corrected or not.

        They are another sequence's, if nothing of them is the row's own. Rows that share a correction share what it has
        been added to. A row that is yet to learn its own shares nothing: it writes its own values into what it takes.
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
            if self.correction_bits is None or correction is not None:
                self._shared[key] = found
        return found


def _fitting(served: Sequence[EntryReuse | None], blocks: int, room_bytes: int) -> list[int]:
    """Return how many blocks of each fit into the room of all, one block of all after the other."""
    sizes = np.array(
        [np.zeros(blocks, np.int64) if each is None else each.block_bytes for each in served], np.int64
    )
    used = np.cumsum(sizes.T).reshape(blocks, -1)
    fits: list[int] = (used <= room_bytes).sum(axis=0).tolist()
    return [0 if each is None else count for each, count in zip(served, fits, strict=True)]


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
