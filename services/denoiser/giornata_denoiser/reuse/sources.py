"""What every sequence of a step does with a template, and the slabs that running rows keep between steps."""

from __future__ import annotations

from collections.abc import Sequence

from giornata.planning.blocks import Mode
from giornata_denoiser.batch import RowKey
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.reuse.recording import EntryRecorder
from giornata_denoiser.reuse.slabs import Slabs
from giornata_denoiser.reuse.template import Entry, Kept
from giornata_denoiser.reuse.uses import Reuse, Use
from giornata_denoiser.row import Row


class Sources:
    """The slabs of running rows. A row that no longer runs leaves none behind.

    Args:
        family: whose slabs they are.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        self._slabs: dict[RowKey, tuple[Slabs, ...]] = {}
        """One of each sequence of a row."""

    def uses(self, rows: Sequence[Row]) -> list[Use]:
        """By sequence of the batch of `rows`: what the next step takes or records. Positive sequences come first."""
        self._slabs = {row.key: self._slabs[row.key] for row in rows if row.key in self._slabs}
        uses = [self._uses_of(row) for row in rows]
        return [of_row[0] for of_row in uses] + [of_row[1] for of_row in uses if len(of_row) > 1]

    def _uses_of(self, row: Row) -> tuple[Use, ...]:
        if row.recording is not None:
            return (EntryRecorder(row.sigma, self._family.blocks, row.recording.forms, row.recording.bits),)
        entry = (
            None if row.template is None or row.region is None else row.template.at(row.sigma, row.tolerance)
        )
        if entry is None:
            self._slabs.pop(row.key, None)
            return (None,) * len(row.prompts)
        modes = tuple(_mode(kept) for kept in entry.blocks)
        return tuple(Reuse(modes, slabs) for slabs in self._slabs_of(row, entry))

    def _slabs_of(self, row: Row, entry: Entry) -> tuple[Slabs, ...]:
        found = self._slabs.get(row.key)
        if found is None or found[0].entry is not entry:
            found = self._slabs[row.key] = tuple(self._made(row, entry, tokens) for tokens in row.own_tokens)
        return found

    def _made(self, row: Row, entry: Entry, own: int) -> Slabs:
        if row.region is None:
            raise ValueError(f"row {row.key} computes everything")
        return Slabs(entry, row.region, own, self._family)


def _mode(kept: Kept) -> Mode:
    """The cheapest use of what a block kept."""
    if kept.key is not None:
        return Mode.KV
    return Mode.FULL if kept.hidden is None else Mode.HIDDEN
