"""Corrections that edits have learned, kept for later edits of the same template and mask. Safe in several threads."""

from __future__ import annotations

import threading

from giornata.packed.region import Region
from giornata_denoiser.blocks.ledger import TierLedger
from giornata_denoiser.rows.correction import Correction
from giornata_denoiser.rows.row import Row

Corrections = tuple[Correction, ...]
"""One of each sequence of a row."""


class KeptCorrections:
    """Corrections by recording, mask and number of sequences, in host memory; the least recently used go first.

    The first edit's stay: those of other seeds and prompts are hardly better for the next one. With `pin` they are kept
    in pinned memory, from which a CUDA device reads asynchronously.
    """

    def __init__(self, budget_bytes: int, *, pin: bool = False) -> None:
        self._lock = threading.Lock()
        self._ledger = TierLedger(budget_bytes)
        self._kept: dict[str, Corrections] = {}
        self._claimed: set[str] = set()
        self._pin = pin
        self.served = 0
        """How many rows were given what an earlier one learned."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all that is kept."""
        with self._lock:
            return self._ledger.size_bytes

    def find(self, recording_id: str, region: Region, sequences: int) -> Corrections | None:
        """What a row of so many sequences takes; None where no edit has learned it."""
        name = _name(recording_id, region, sequences)
        with self._lock:
            found = self._kept.get(name)
            if found is not None:
                self._ledger.use(name)
                self.served += 1
        return found

    def claim(self, row: Row) -> bool:
        """Whether `row` brings corrections that are not here and would fit; who is told so calls :meth:`keep`."""
        name = _name_of(row)
        if name is None or _size_bytes(row) > self._ledger.budget_bytes:
            return False
        with self._lock:
            new = name not in self._kept and name not in self._claimed
            if new:
                self._claimed.add(name)
        return new

    def keep(self, row: Row) -> None:
        """Keep the corrections of a claimed `row`, unless its template was removed meanwhile. Pinning blocks."""
        name, corrections = _name_of(row), row.corrections
        if name is None or corrections is None:
            raise ValueError(f"row {row.key} has no corrections")
        try:
            if self._pin:
                corrections = tuple(correction.pinned() for correction in corrections)
        except Exception:  # such as no memory to pin: another row may claim it
            with self._lock:
                self._claimed.discard(name)
            raise
        with self._lock:
            if name in self._claimed:
                self._claimed.discard(name)
                self._kept[name] = corrections
                for gone in self._ledger.add(name, _size_bytes(row)):
                    self._kept.pop(gone, None)

    def remove_all(self, prefix: str) -> None:
        """Remove the corrections of every recording whose id begins with `prefix`, and let claims lapse."""
        with self._lock:
            self._claimed = {name for name in self._claimed if not name.startswith(prefix)}
            for name in [name for name in self._kept if name.startswith(prefix)]:
                del self._kept[name]
                self._ledger.remove(name)


def _name(recording_id: str, region: Region, sequences: int) -> str:
    return f"{recording_id}/{region.digest.hex()}/{sequences}"


def _name_of(row: Row) -> str | None:
    if row.template is None or row.region is None or row.corrections is None:
        return None
    return _name(row.template.id, row.region, len(row.prompts))


def _size_bytes(row: Row) -> int:
    return sum(correction.size_bytes for correction in row.corrections or ())
