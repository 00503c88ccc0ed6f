"""First templates: what edits have left of pictures without a recording, in host memory. Safe in several threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from giornata.residency.tiers import LoadedTier
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_denoiser.templates.identity import ORDINARY, HostMemory

EXPECTED: Final = 4096
"""Most edits under way that are expected to leave something. Those that never end are forgotten in their order."""


class FirstTemplates:
    """Recordings that edits have left, by name; the least recently used go first.

    One shows the picture outside of what its edit repainted (:attr:`CachedTemplate.edited`), at the noise levels of
    that edit's steps in full. They lie where `host` puts them.
    """

    def __init__(self, budget_bytes: int, *, host: HostMemory = ORDINARY) -> None:
        self.budget_bytes: Final = budget_bytes
        """The most that may be kept."""
        self._tier: LoadedTier[CachedTemplate] = LoadedTier(budget_bytes, lambda left: left.size_bytes)
        self._expected: OrderedDict[str, None] = OrderedDict()
        self._host = host
        self.left = 0
        """How many were kept so far."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all that is kept."""
        return self._tier.size_bytes

    def __iter__(self) -> Iterator[str]:
        """Names, in the order of their last use."""
        return iter(self._tier)

    def holds(self, recording: CachedTemplate) -> bool:
        """Return whether this very recording is here."""
        return any(self._tier.peek(name) is recording for name in self._tier)

    def find(self, name: str) -> CachedTemplate | None:
        """Return what an edit has left; None where none has, or it had to go."""
        return self._tier.get(name)

    def expect(self, name: str) -> None:
        """An edit begins that will leave `name`, unless that is removed before."""
        with self._tier.lock:
            self._expected[name] = None
            self._expected.move_to_end(name)
            if len(self._expected) > EXPECTED:
                self._expected.popitem(last=False)

    def keep(self, row: Row) -> None:
        """Keep what an edit that is done has left, if it is expected still, whole and finite. Pinning blocks.

        Whole is what was recorded at every step that was to be in full: a row that failed on the way leaves less.
        """
        if row.records is None or row.region is None:
            raise ValueError(f"row {row.key} leaves nothing")
        name = row.records.name
        # Each has a name of its own as a recording, since what edits learn belongs to it and not to a later one.
        left = CachedTemplate(
            f"{name}-{row.key.job_id}",
            row.grid,
            row.entries,
            edited=row.region,
            noise=row.conditioning["noise"],
        )
        if len(left.entries) < row.steps_in_full or not left.finite:
            return
        left = self._host.recording(left)
        with self._tier.lock:
            if name not in self._expected:
                return
            del self._expected[name]
            self.left += 1
            self._tier.keep(name, left)

    def remove(self, name: str) -> None:
        """Remove what an edit has left, and expect it no more; edits that run with it go on."""
        with self._tier.lock:
            self._forget(name)

    def remove_all(self, prefix: str) -> None:
        """Remove all whose names begin with `prefix`, and expect them no more."""
        with self._tier.lock:
            for name in [name for name in (*self._expected, *self._tier) if name.startswith(prefix)]:
                self._forget(name)

    def _forget(self, name: str) -> None:
        self._expected.pop(name, None)
        self._tier.remove(name)
