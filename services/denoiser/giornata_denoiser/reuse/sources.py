"""What every sequence of a step does with a template, and the slabs that running rows keep between steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from giornata.planning.blocks import Mode
from giornata_denoiser.batch import RowKey
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.reuse.loader import Load, Loader
from giornata_denoiser.reuse.recording import EntryRecorder
from giornata_denoiser.reuse.slabs import Slabs
from giornata_denoiser.reuse.template import Entry, Kept
from giornata_denoiser.reuse.uses import Reuse, Use
from giornata_denoiser.row import Row


@dataclass(frozen=True, eq=False)
class Served:
    """A row that takes from one entry: the slabs of each of its sequences, and its modes."""

    entry: Entry
    slabs: tuple[Slabs, ...]
    modes: tuple[Mode, ...]

    @property
    def size_bytes(self) -> int:
        """Of all slabs that the modes take."""
        return sum(
            slabs.size_bytes(block, mode) for slabs in self.slabs for block, mode in enumerate(self.modes)
        )

    def uses(self) -> tuple[Reuse, ...]:
        """One of each sequence."""
        return tuple(Reuse(self.modes, slabs) for slabs in self.slabs)


class Sources:
    """The slabs of running rows. A row that no longer runs leaves none behind.

    Args:
        family: whose slabs they are.
        loader: loads ahead, this step's slabs and the next one's; without it each is loaded when its block asks.
        ahead_bytes: most slabs that are loaded for a next step.
    """

    def __init__(self, family: Family, loader: Loader | None = None, ahead_bytes: int = 1 << 30) -> None:
        self._family, self._loader, self._ahead_bytes = family, loader, ahead_bytes
        self._served: dict[RowKey, Served] = {}
        self._next: dict[RowKey, Served] = {}

    def uses(self, rows: Sequence[Row]) -> list[Use]:
        """By sequence of the batch of `rows`: what the next step takes or records. Positive sequences come first."""
        before = (self._served, self._next)
        self._served = dict(self._serving(rows, before))
        self._next = {}
        if self._loader is not None:
            self._loader.ask(_in_order(self._served.values()))
            self._next = dict(self._following(rows))
            wanted = {
                slabs for served in (*self._served.values(), *self._next.values()) for slabs in served.slabs
            }
            self._loader.forget(lambda slabs: slabs not in wanted)
            self._loader.ask(_in_order(self._next.values()))
        uses = [self._uses_of(row) for row in rows]
        return [of_row[0] for of_row in uses] + [of_row[1] for of_row in uses if len(of_row) > 1]

    def _uses_of(self, row: Row) -> tuple[Use, ...]:
        if row.recording is not None:
            return (EntryRecorder(row.sigma, self._family.blocks, row.recording.forms, row.recording.bits),)
        served = self._served.get(row.key)
        return (None,) * len(row.prompts) if served is None else served.uses()

    def _serving(
        self, rows: Sequence[Row], before: Sequence[dict[RowKey, Served]]
    ) -> Iterator[tuple[RowKey, Served]]:
        """Every row's source in this step; what is here already stays."""
        for row in rows:
            entry = _entry(row, row.step)
            if entry is not None:
                here = [known[row.key] for known in before if row.key in known]
                kept = next((served for served in here if served.entry is entry), None)
                yield row.key, kept or self._made(row, entry)

    def _following(self, rows: Sequence[Row]) -> Iterator[tuple[RowKey, Served]]:
        """Likewise in the next step, where that is another one, as far as there is room."""
        room = self._ahead_bytes
        for row in rows:
            entry = None if row.step + 1 >= row.steps else _entry(row, row.step + 1)
            now = self._served.get(row.key)
            if entry is None or (now is not None and now.entry is entry):
                continue
            served = self._made(row, entry)
            room -= served.size_bytes
            if room < 0:
                return
            yield row.key, served

    def _made(self, row: Row, entry: Entry) -> Served:
        region = row.region
        if region is None:
            raise ValueError(f"row {row.key} computes everything")
        slabs = tuple(Slabs(entry, region, own, self._family) for own in row.own_tokens)
        return Served(entry, slabs, tuple(_mode(kept) for kept in entry.blocks))


def _entry(row: Row, step: int) -> Entry | None:
    """What serves a row's step, if anything does."""
    if row.template is None or row.region is None or row.recording is not None:
        return None
    return row.template.at(float(row.sigmas.sigmas[step]), row.tolerance)


def _mode(kept: Kept) -> Mode:
    """The cheapest use of what a block kept."""
    if kept.key is not None:
        return Mode.KV
    return Mode.FULL if kept.hidden is None else Mode.HIDDEN


def _in_order(served: Iterable[Served]) -> Iterator[Load]:
    """Loads in the order in which blocks ask for them."""
    every = list(served)
    for block in range(max((len(each.modes) for each in every), default=0)):
        for each in every:
            if each.modes[block] is not Mode.FULL:
                yield from (Load(slabs, block, each.modes[block]) for slabs in each.slabs)
