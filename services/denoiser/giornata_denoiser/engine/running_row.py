"""A running row at the planner: which cache serves its steps, and what of it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from giornata.packed.attention import CachedKVRecorder
from giornata.packed.compute_set import BlockInputs, CachedTokens
from giornata.planning.batch_plans import BatchPlanner, BatchRow
from giornata.planning.block_plans import Counts, LoadLink, takes
from giornata.planning.operations import NetworkOperations, SequenceShape
from giornata.planning.step_costs import SLABS, BlockLoads, StepCosts, row_blocks, slab_unit
from giornata.wire.values import BlockMode
from giornata_denoiser.blocks.recorders import CorrectionRecorder, EntryRecorder, OwnKeysValues, Recorders
from giornata_denoiser.blocks.slabs import CacheSharder, Slabs
from giornata_denoiser.engine.loading import SlabRun
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import Correction, Entry

# The padding of a row's prompts at the planner: some steps compute it, and those after them take what they
# made.


class PromptPaddingCache:
    """The kept padding of a row's prompts, and whether the present step takes it.

    `kept` has one of each sequence; None for a prompt without padding.
    """

    def __init__(self, kept: Sequence[OwnKeysValues | None]) -> None:
        self._kept = tuple(kept)
        self._kept_at: int | None = None
        """The step that last computed it."""
        self.taken = False

    def advance(self, row: Row, *, whole: bool) -> None:
        """Choose for the next step of `row`: computed with the `whole` picture, or where nothing is kept.

        A step that failed and is tried again computes it again: it may have kept a part.
        """
        self.taken = self._kept_at is not None and self._kept_at < row.step and not whole
        if not self.taken:
            self._kept_at = row.step

    def added(self, uses: Sequence[BlockInputs]) -> tuple[BlockInputs, ...]:
        """The row's `uses`, one of each sequence, with that of its padding."""
        return tuple(
            use if kept is None else self._added(use, kept)
            for use, kept in zip(uses, self._kept, strict=True)
        )

    def _added(self, use: BlockInputs, kept: OwnKeysValues) -> BlockInputs:
        if self.taken:
            return replace(use, padding=kept)
        return replace(use, padding_recorder=CachedKVRecorder(kept))


# A row without a template at the planner: it takes its own keys and values, which every few steps are made
# anew.


class RefreshSchedule:
    """The caches of a row's sequences, and whether the present step computes in full to make them anew."""

    def __init__(self, kept: Sequence[OwnKeysValues]) -> None:
        self._kept = tuple(kept)
        self._renewed_at: int | None = None
        """The step that was last computed in full."""
        self.full = True
        """Whether the present step is computed in full."""

    def advance(self, row: Row) -> None:
        """Choose how the next step of `row` is computed: in full where that is due, or nothing is kept.

        A step in full that failed and is tried again is in full again: it may have renewed a part.
        """
        lost = self._renewed_at is None or self._renewed_at >= row.step
        self.full = lost or not row.masked
        if self.full:
            self._renewed_at = row.step

    def modes(self, blocks: int) -> tuple[BlockMode, ...]:
        """Return what so many blocks of the step compute."""
        return (BlockMode.FULL if self.full else BlockMode.KV,) * blocks

    def uses(self, blocks: int) -> tuple[BlockInputs, ...]:
        """One of each sequence."""
        if self.full:
            return tuple(BlockInputs(recorder=CachedKVRecorder(kept)) for kept in self._kept)
        return tuple(BlockInputs(CachedTokens(self.modes(blocks), kept)) for kept in self._kept)


# What serves a row's step from one entry, and the modes in which its blocks run.


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
            kv * slabs.sizes(BlockMode.KV) + hidden * slabs.sizes(BlockMode.HIDDEN)
            for slabs in self._distinct
        ]
        return sum(sizes[1:], sizes[0])

    @property
    def keeps(self) -> bool:
        """Return whether its slabs keep what a step writes into them."""
        return all(slabs.keeps for slabs in self.slabs)

    @property
    def missing_bytes(self) -> int:
        """Bytes that have to move for the modes."""
        _, kv, hidden = takes(self.modes)
        return sum(
            int(kv @ slabs.moving(BlockMode.KV)) + int(hidden @ slabs.moving(BlockMode.HIDDEN))
            for slabs in self._distinct
        )

    def uses(self) -> tuple[BlockInputs, ...]:
        """One of each sequence."""
        if self.learning:
            return tuple(BlockInputs(recorder=recorder) for recorder in self.learning)
        return tuple(BlockInputs(CachedTokens(self.modes, slabs)) for slabs in self.slabs)

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


def plan_modes(
    now: Sequence[EntryReuse],
    following: Sequence[EntryReuse | None],
    costs: StepCosts,
    operations: NetworkOperations,
    planner: BatchPlanner,
    *,
    beside_ms: float,
    busy_ms: float,
    shared: bool,
) -> tuple[list[EntryReuse], float]:
    """The rows with the modes of this step, and its predicted end in ms, its fixed costs not counted.

    Plans across the step boundary: a load that this step could wait for may be the next step's delay. `following` is,
    for each row of `now`, what serves it in the next step, where that is another entry. A block takes `beside_ms`
    besides these rows, and the loader begins after `busy_ms`. Where loads are `shared`, rows of one entry load it once.
    """
    blocks = len(now[0].modes)
    # Loads of the next step, if the plan looks that far.
    loads = [row.loads() for row in now]
    windows = loads
    if any(following):
        none = BlockLoads.equal(blocks, hidden_kept=False)
        windows = [
            own.then(none if after is None else after.loads())
            for own, after in zip(loads, following, strict=True)
        ]
    unit = slab_unit(windows)
    link = LoadLink(costs.load[0] / SLABS + costs.load[1] * unit, busy_ms)
    loaded_once = [id(row.entry) if shared else id(row.slabs[0]) for row in now]
    works = [
        row_blocks(costs, operations, served.shapes, window, unit)
        for served, window in zip(now, windows, strict=True)
    ]
    plan = planner(list(map(BatchRow, works, loaded_once)), link, beside_ms)
    chosen = [
        _with_modes(row, modes[:blocks], own) for row, modes, own in zip(now, plan.modes, loads, strict=True)
    ]
    return chosen, plan.timeline.ended_ms[blocks - 1]


def _with_modes(served: EntryReuse, modes: tuple[BlockMode, ...], loads: BlockLoads) -> EntryReuse:
    """Final, if the modes are those of a row that has loaded everything."""
    return replace(served, modes=modes, final=modes == served.entry.modes or not loads.largest_bytes)


# A running row at the planner: which entry serves its steps, and what of it is loaded.


class RowCacheFactories(NamedTuple):
    """Factories of the caches that the sequences of rows take from."""

    slabs: Callable[[Row, Entry, int, Correction | None], Slabs]
    """The slabs of a row's entry for a sequence that computes so many tokens, corrected or not."""
    own: Callable[[Row, int], OwnKeysValues]
    """What a sequence that computes so many tokens keeps of a step in full."""
    padding: Callable[[], OwnKeysValues]
    """What a sequence keeps of its prompt's padding."""
    entry: Callable[[Row], EntryRecorder]
    """What records a row's present step for later edits."""
    narrowing: CacheSharder
    """To what this process takes."""


class RunningRow:
    """All that one row has at the planner, from the step in which it joins until it leaves."""

    def __init__(
        self, row: Row, make: RowCacheFactories, correction_bits: int | None, *, together: bool = False
    ) -> None:
        self.row = row
        """At its present step."""
        self.served: EntryReuse | None = None
        """What serves the present step; None computes everything."""
        self.next: EntryReuse | None = None
        """What is loaded ahead: the next entry that is not the present one."""
        self.ahead = 0
        """How many of its blocks, from the first one."""
        self.shapes = row.shapes
        """Shapes of the row's sequences in the present step."""
        self.recorder: EntryRecorder | None = None
        """Records the present step, if the row leaves that behind."""
        self._complete: tuple[Slabs, ...] | None = None
        """Slabs of which everything that the row takes has been found to be here."""
        self._make, self._correction_bits, self._together = make, correction_bits, together
        self._entries = tuple(map(make.narrowing.entry, _entries(row)))
        self._after = tuple(
            next((after for after in self._entries[step + 1 :] if after not in (None, now)), None)
            for step, now in enumerate(self._entries)
        )
        """By step: the next entry that is not its own."""
        self._inputs: tuple[tuple[object, ...], tuple[BlockInputs, ...]] = ((), ())
        """What the last step's inputs were of, and these inputs."""
        self._renewing = (
            RefreshSchedule([make.own(row, own) for own in row.own_tokens]) if row.renews else None
        )
        padding = [make.padding() if tokens else None for tokens in row.padding]
        self._padding = PromptPaddingCache(padding) if any(row.padding) else None

    def is_of(self, row: Row) -> bool:
        """Return whether `row` is this row some steps later, under the same LoRAs, and not another row of its name."""
        was = self.row
        return (
            row.conditioning is was.conditioning
            and row.template is was.template
            and row.renewed_every == was.renewed_every
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
        self.recorder = None
        if row.records is not None and (
            row.background or (self._renewing is not None and self._renewing.full)
        ):
            self.recorder = self._make.entry(row)
        if self._padding is None:
            return
        self._padding.advance(row, whole=self._whole)
        self.shapes = row.shaped(padding_kept=self._padding.taken)
        if self.served is not None and self.served.shapes != self.shapes:
            self.served = replace(self.served, shapes=self.shapes)

    @property
    def _whole(self) -> bool:
        """Return whether the step computes the whole picture, without regard to costs."""
        if self._renewing is not None:
            return self._renewing.full
        return self.served is None or bool(self.served.learning)

    def _serve(self, row: Row) -> None:
        """Choose what serves the next step of `row`."""
        entry, served = self._entries[row.step], self.served
        self.row, self.served = row, None
        if self._renewing is not None:
            self._renewing.advance(row)
        if entry is None:
            return
        if served is not None and served.learning and (served.step == row.step or not served.keeps):
            # Either the step that was to teach the corrections has failed and is tried again: the slabs may hold the
            # row's own values already. Or they do not hold them, and the corrections are added from now on.
            served = None
        if self.next is not None and self.next.entry is entry:
            served, self.next = self.next, None
        if served is None or served.entry is not entry:
            served = self.made(entry)
        self.served = self._learning(replace(served, learning=()) if served.learning else served)

    def made(self, entry: Entry) -> EntryReuse:
        """Return what serves the row from `entry`, nothing of it loaded."""
        row = self.row
        known = None if self._correction_bits is None else row.corrections
        corrections: Sequence[Correction | None] = (None,) * len(row.prompts)
        if known is not None and row.region is not None:
            corrections = [self._make.narrowing.correction(each, row.region) for each in known]
        slabs = tuple(
            self._make.slabs(row, entry, own, correction)
            for own, correction in zip(row.own_tokens, corrections, strict=True)
        )
        return EntryReuse(entry, slabs, self.shapes, entry.modes, final=self._together)

    def uses(self, blocks: int) -> tuple[BlockInputs, ...]:
        """Return what each of the row's sequences does in a forward of so many `blocks`.

        They are the last step's objects where nothing has changed: so a batch knows that its plan stays.
        """
        full = self._renewing is not None and self._renewing.full
        of = self.served, self.recorder, full, self._padding is not None and self._padding.taken
        if self._inputs[0] != of:
            self._inputs = of, self._made_inputs(blocks)
        return self._inputs[1]

    def _made_inputs(self, blocks: int) -> tuple[BlockInputs, ...]:
        uses = self._uses(blocks)
        if self.recorder is not None:
            uses = (*uses[:-1], _recorded(uses[-1], self.recorder))
        return uses if self._padding is None else self._padding.added(uses)

    def _uses(self, blocks: int) -> tuple[BlockInputs, ...]:
        """The same, but for padding."""
        if self._renewing is not None:
            return self._renewing.uses(blocks)
        return (BlockInputs(),) * len(self.row.prompts) if self.served is None else self.served.uses()

    def computed(self, blocks: int) -> tuple[BlockMode, ...]:
        """Return what so many blocks of the step compute."""
        if self._renewing is not None:
            return self._renewing.modes(blocks)
        served = self.served
        return (BlockMode.FULL,) * blocks if served is None or served.learning else served.modes

    def _learning(self, served: EntryReuse) -> EntryReuse | None:
        """A step without corrections is computed in full and teaches them; None where no later step needs them."""
        region, bits = self.row.region, self._correction_bits
        if bits is None or region is None or self.row.corrections is not None:
            return served
        if not any(self._entries[self.row.step + 1 :]):
            return None
        return replace(
            served,
            learning=tuple(CorrectionRecorder(slabs, bits) for slabs in served.slabs),
            step=self.row.step,
        )


def _recorded(use: BlockInputs, recorder: EntryRecorder) -> BlockInputs:
    """Return what `use` says, recorded besides.

    It is that of a row's last sequence: with classifier-free guidance the unguided one, which no prompt directs.
    """
    return replace(use, recorder=recorder if use.recorder is None else Recorders(use.recorder, recorder))


def _entries(row: Row) -> tuple[Entry | None, ...]:
    """The entry of each step by its noise level, and None after the last one.

    A row without a region takes nothing.
    """
    if row.template is None or row.region is None:
        return (None,) * (row.steps + 1)
    levels = row.track.levels[: row.steps].tolist()
    return (*row.template.at_each(levels, row.tolerance), None)
