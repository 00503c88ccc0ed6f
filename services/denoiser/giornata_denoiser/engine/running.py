"""A running row at the planner: which entry serves each of its steps, and what it keeps between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from giornata.packed.uses import Use
from giornata_denoiser.blocks.correction import Correction
from giornata_denoiser.blocks.recording import EntryRecorder
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.engine.served import Served, preferred
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import Entry

MakeSlabs = Callable[[Row, Entry, int, Correction | None], Slabs]
"""Makes the slabs of a row's entry for a sequence that computes so many tokens, corrected or not."""


class Running:
    """All that one row has at the planner, from the step in which it joins until it leaves.

    Args:
        row: as it joins.
        make_slabs: makes its slabs.
        correction_bits: bits of its correction; None corrects nothing.
    """

    def __init__(self, row: Row, make_slabs: MakeSlabs, correction_bits: int | None) -> None:
        self.row = row
        """At its present step."""
        self.served: Served | None = None
        """What serves the present step; None computes everything."""
        self.next: Served | None = None
        """What is loaded ahead: the next entry that is not the present one."""
        self._make_slabs, self._correction_bits = make_slabs, correction_bits
        self._entries = _entries(row)
        self._corrections: tuple[Correction, ...] | None = None

    def is_of(self, row: Row) -> bool:
        """Whether `row` is this row some steps later, and not another row of its name."""
        return row.conditioning is self.row.conditioning and row.template is self.row.template

    @property
    def plannable(self) -> Served | None:
        """What serves the step, if its modes may still change."""
        served = self.served
        return None if served is None or served.final or served.corrections else served

    @property
    def changes(self) -> bool:
        """Whether another entry than the present one serves the next step."""
        return self._entry(self.row.step + 1) is not self._entry(self.row.step)

    @property
    def following(self) -> Entry | None:
        """The next entry that is not the present one; None while the correction of the row is not known."""
        if self.served is not None and self.served.corrections:
            return None
        now = self._entry(self.row.step)
        return next((entry for entry in self._entries[self.row.step + 1 :] if entry not in (None, now)), None)

    def advance(self, row: Row) -> None:
        """Choose what serves the next step of `row`; slabs that are here already stay."""
        entry, served = self._entry(row.step), self.served
        self.row, self.served = row, None
        if entry is None:
            return
        if served is not None and served.corrections and served.step == row.step:
            # The step that was to teach the correction has failed and is tried again: half of the correction may be
            # known, and the slabs may hold the row's own values already.
            self._corrections = served = None
        if self.next is not None and self.next.entry is entry:
            served, self.next = self.next, None
        if served is None or served.entry is not entry:
            served = self.made(entry)
        self.served = self._correcting(replace(served, corrections=(), step=row.step))

    def made(self, entry: Entry) -> Served:
        """What serves the row from `entry`, nothing of it loaded."""
        row = self.row
        corrections: Sequence[Correction | None] = self._corrections or (None,) * len(row.prompts)
        slabs = tuple(
            self._make_slabs(row, entry, own, correction)
            for own, correction in zip(row.own_tokens, corrections, strict=True)
        )
        return Served(entry, slabs, row.shapes, preferred(entry))

    def uses(self, blocks: int) -> tuple[Use, ...]:
        """What each of the row's sequences does in a forward of so many `blocks`."""
        what = self.row.records
        if what is not None:
            recorder = EntryRecorder(self.row.level, blocks, what.forms, what.bits, what.first_block)
            return (Use(recorder=recorder),)
        return (Use(),) * len(self.row.prompts) if self.served is None else self.served.uses()

    def _entry(self, step: int) -> Entry | None:
        return self._entries[step] if step < len(self._entries) else None

    def _correcting(self, served: Served) -> Served | None:
        """The first step is computed in full and teaches the correction; None where no later step needs one."""
        region, bits = self.row.region, self._correction_bits
        if bits is None or region is None or self._corrections is not None:
            return served
        if not any(self._entries[self.row.step + 1 :]):
            return None
        self._corrections = tuple(Correction(slabs, region, bits) for slabs in served.slabs)
        return replace(served, corrections=self._corrections)


def _entries(row: Row) -> tuple[Entry | None, ...]:
    """The entry of each step by its noise level; a template run takes nothing, nor does a row without a region."""
    if row.template is None or row.region is None or row.records is not None:
        return (None,) * row.steps
    levels = row.track.levels[: row.steps].tolist()
    return tuple(row.template.at(level, row.tolerance) for level in levels)
