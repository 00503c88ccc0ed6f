"""Corrections that edits have learned, kept for later ones of the template, by masks. Safe in several threads."""

from __future__ import annotations

from itertools import islice
from typing import Final, NamedTuple

import torch

from giornata.packed.compute_set import Region, unite_regions
from giornata.residency.tiers import LoadedTier
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import Correction
from giornata_denoiser.templates.identity import ORDINARY, HostMemory

Corrections = tuple[Correction, ...]
"""One of each sequence of a row."""
TRIED: Final = 32
"""So many of a recording's corrections are tried for a mask that is new."""


class _CorrectionEntry(NamedTuple):
    region: Region
    """Outside of which it corrects."""
    corrections: Corrections


class CorrectionCache:
    """Corrections by recording, mask, number of sequences, and LoRAs under which they were learned.

    They are in host memory; the least recently used go first. `under` is what
    :meth:`giornata_denoiser.rows.row.Adapters.learned_under` tells.

    The first edit's stay: those of other seeds and prompts are hardly better for the next one. They lie where
    `host` puts them.
    """

    def __init__(self, budget_bytes: int, *, host: HostMemory = ORDINARY) -> None:
        self._budget_bytes = budget_bytes
        self._tier: LoadedTier[_CorrectionEntry] = LoadedTier(
            budget_bytes, lambda entry: _size_bytes(entry.corrections)
        )
        self._claimed: set[str] = set()
        self._host = host
        self.served = 0
        """How many rows were given what an earlier one learned."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all that is kept."""
        return self._tier.size_bytes

    def find(self, recording_id: str, region: Region, sequences: int, under: str = "") -> Corrections | None:
        """Return what a row of so many sequences takes; None where no edit has learned it."""
        name = _name(recording_id, region, sequences, under)
        with self._tier.lock:
            found = self._tier.get(name)
            self.served += found is not None
        return None if found is None else found.corrections

    def nearest(self, recording_id: str, region: Region, sequences: int, under: str = "") -> Region | None:
        """The smallest region that holds `region` and for which :meth:`widened` has corrections; None where none has.

        It is `region` with that of another mask: what lies outside of both, an edit of the other has learned.
        """
        unions = [
            unite_regions(region, kept.region) for _, kept in self._latest(recording_id, sequences, under)
        ]
        return min(
            (union for union in unions if union is not None),
            key=lambda union: len(union.computed),
            default=None,
        )

    def widened(
        self, recording_id: str, region: Region, sequences: int, under: str = ""
    ) -> Corrections | None:
        """Return what a row of a region of :meth:`nearest` takes; None where it has gone meanwhile.

        Copies at the first time, and keeps the copy.
        """
        found = self.find(recording_id, region, sequences, under)
        if found is not None:
            return found
        for source, kept in self._latest(recording_id, sequences, under):
            inside = torch.isin(kept.region.outside, region.outside)
            if int(inside.sum()) < len(region.outside):
                continue
            index = inside.nonzero().squeeze(1)
            made = self._placed(tuple(each.narrowed(index) for each in kept.corrections))
            with self._tier.lock:
                self.served += 1
                if source in self._tier:  # else its template was removed meanwhile
                    self._tier.keep(
                        _name(recording_id, region, sequences, under), _CorrectionEntry(region, made)
                    )
            return made
        return None

    def _latest(self, recording_id: str, sequences: int, under: str) -> list[tuple[str, _CorrectionEntry]]:
        """Return what is kept for rows of so many sequences, the last used :data:`TRIED`, the latest first."""
        prefix, suffix = f"{recording_id}/", f"/{sequences}/{under}"
        with self._tier.lock:
            names = (n for n in reversed(tuple(self._tier)) if n.startswith(prefix) and n.endswith(suffix))
            kept = [(name, self._tier.peek(name)) for name in islice(names, TRIED)]
        return [(name, entry) for name, entry in kept if entry is not None]

    def claim(self, row: Row) -> bool:
        """Whether `row` brings corrections that are not here and would fit; who is told so calls :meth:`keep`."""
        name = _name_of(row)
        if name is None or _size_bytes(row.corrections or ()) > self._budget_bytes:
            return False
        with self._tier.lock:
            new = name not in self._tier and name not in self._claimed
            if new:
                self._claimed.add(name)
        return new

    def keep(self, row: Row) -> None:
        """Keep the corrections of a claimed `row`, unless its template was removed meanwhile. Pinning blocks."""
        name, corrections = _name_of(row), row.corrections
        if name is None or corrections is None or row.region is None:
            raise ValueError(f"row {row.key} has no corrections")
        try:
            corrections = self._placed(corrections)
        except Exception:  # such as no memory there: another row may claim it
            with self._tier.lock:
                self._claimed.discard(name)
            raise
        with self._tier.lock:
            if name in self._claimed:
                self._claimed.discard(name)
                self._tier.keep(name, _CorrectionEntry(row.region, corrections))

    def _placed(self, corrections: Corrections) -> Corrections:
        return tuple(map(self._host.correction, corrections))

    def remove_all(self, prefix: str) -> None:
        """Remove the corrections of every recording whose id begins with `prefix`, and let claims lapse."""
        with self._tier.lock:
            self._claimed = {name for name in self._claimed if not name.startswith(prefix)}
            for name in self._tier:
                if name.startswith(prefix):
                    self._tier.remove(name)


def _name(recording_id: str, region: Region, sequences: int, under: str) -> str:
    return f"{recording_id}/{region.digest.hex()}/{sequences}/{under}"


def _name_of(row: Row) -> str | None:
    if row.template is None or row.region is None or row.corrections is None:
        return None
    if any(each.group for each in row.corrections):  # it is a part of what they are
        return None
    under = row.adapters.learned_under(row.step - 1)  # in the step behind it
    return None if under is None else _name(row.template.id, row.region, len(row.prompts), under)


def _size_bytes(corrections: Corrections) -> int:
    return sum(correction.size_bytes for correction in corrections)
