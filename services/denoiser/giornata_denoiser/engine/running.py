"""A running row at the planner: which entry serves its steps, and what of it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from giornata.packed.uses import BlockInputs
from giornata.wire.values import BlockMode
from giornata_denoiser.blocks.narrowing import CacheSharder
from giornata_denoiser.blocks.own import OwnKeysValues
from giornata_denoiser.blocks.recording import CorrectionRecorder, EntryRecorder, Recorders
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.engine.padding import PromptPaddingCache
from giornata_denoiser.engine.renewing import RefreshSchedule
from giornata_denoiser.engine.served import EntryReuse
from giornata_denoiser.rows.correction import Correction
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import Entry


class RowCacheFactories(NamedTuple):
    """What makes what the sequences of rows take."""

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
        self._renewing = (
            RefreshSchedule([make.own(row, own) for own in row.own_tokens]) if row.renews else None
        )
        padding = [make.padding() if tokens else None for tokens in row.padding]
        self._padding = PromptPaddingCache(padding) if any(row.padding) else None

    def is_of(self, row: Row) -> bool:
        """Whether `row` is this row some steps later, under the same LoRAs, and not another row of its name."""
        return (
            row.conditioning is self.row.conditioning
            and row.template is self.row.template
            and row.renewed_every == self.row.renewed_every
            and row.adapters.acting(row.step) == self.row.adapters.acting(self.row.step)
        )

    @property
    def plannable(self) -> EntryReuse | None:
        """What serves the step, if its modes may still change."""
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
        """What its loads follow from: while it stays the same, nothing else is to be loaded."""
        served, after = self.served, self.next
        now = () if served is None else (served.slabs, served.modes, served.final, bool(served.learning))
        return (*now, self.changes, self.ahead, None if after is None else after.slabs)

    @property
    def changes(self) -> bool:
        """Whether another entry than the present one serves the next step."""
        return self._entries[self.row.step + 1] is not self._entries[self.row.step]

    @property
    def following(self) -> Entry | None:
        """The next entry that is not the present one; None while its corrections are not known."""
        if self.served is not None and self.served.learning:
            return None
        now, *later = self._entries[self.row.step :]
        return next((entry for entry in later if entry not in (None, now)), None)

    def advance(self, row: Row) -> None:
        """Choose what the next step of `row` computes and what serves it; slabs that are here already stay."""
        self._serve(row)
        left = row.background or (self._renewing is not None and self._renewing.full)
        self.recorder = self._make.entry(row) if row.records is not None and left else None
        if self._padding is None:
            return
        self._padding.advance(row, whole=self._whole)
        self.shapes = row.shaped(padding_kept=self._padding.taken)
        if self.served is not None and self.served.shapes != self.shapes:
            self.served = replace(self.served, shapes=self.shapes)

    @property
    def _whole(self) -> bool:
        """Whether the step computes the whole picture, without regard to costs."""
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
        """What serves the row from `entry`, nothing of it loaded."""
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
        """What each of the row's sequences does in a forward of so many `blocks`."""
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
        """What so many blocks of the step compute."""
        if self._renewing is not None:
            return self._renewing.modes(blocks)
        return (BlockMode.FULL,) * blocks if self.served is None else self.served.computed

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
    """What `use` says, recorded besides.

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
