"""The approximate prompt cache: entries by key, what a new job begins with, and what has to go. Pure.

It knows latents by their claim checks alone; the caller deletes what it is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from giornata.approximate.eviction import Lcbfu
from giornata.approximate.index import Near, PromptIndex, Vector
from giornata.approximate.table import SkipTable
from giornata.wire.approximate import Beginning, KeptLatent, PromptEntry
from giornata.wire.jobs import BlobRef

OVER: Final = 4
"""Entries that are looked at beyond those that are needed: of some the latents have gone."""


@dataclass
class Counts:
    """Since the start."""

    hits: int = 0
    """Rows that were given another edit's latent."""
    misses: int = 0
    """Rows that asked for one and found none."""
    saved_steps: int = 0
    evicted: int = 0
    """Latents that had to go."""


@dataclass(frozen=True)
class Changes:
    """What the caller has to do."""

    deleted: tuple[BlobRef, ...] = ()
    """Latents that nothing refers to any more."""
    written: PromptEntry | None = None
    """The entry as it is to be recorded; None where it did not fit."""
    shrunk: tuple[PromptEntry, ...] = ()
    """Entries that have fewer latents now."""
    removed: tuple[str, ...] = ()
    """Ids of entries that are gone."""


class PromptCache:
    """Entries within `budget_bytes` of latents, least by LCBFU out first."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.counts = Counts()
        self.size_bytes = 0
        """Of all latents."""
        self._entries: dict[str, PromptEntry] = {}
        self._indexes: dict[str, PromptIndex] = {}
        self._worth = Lcbfu[tuple[str, int]]()
        """Entry and step of every latent."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PromptEntry]:
        return iter(self._entries.values())

    def add(self, entry: PromptEntry) -> Changes:
        """Take in an edit that has ended; one that is here already changes nothing.

        An entry whose embedding has another size than others of its key is let go of.
        """
        if entry.entry_id in self._entries:
            return Changes(written=self._entries[entry.entry_id])
        if not entry.kept:
            return Changes()
        index = self._indexes.setdefault(entry.key, PromptIndex())
        try:
            index.add(entry.entry_id, vector_of(entry.embedding))
        except ValueError:
            self._drop_empty(entry.key)
            return Changes(deleted=tuple(one.latents for one in entry.kept))
        self._entries[entry.entry_id] = entry
        self.size_bytes += entry.size_bytes
        for one in entry.kept:
            self._worth.add((entry.entry_id, one.step), one.step)
        return self._evicted(entry.entry_id)

    def find(
        self, key: str, embedding: bytes, *, rows: int, steps: int, table: SkipTable
    ) -> tuple[Beginning | None, ...]:
        """Where each of a job's rows may begin, each with another entry; None for rows that find none.

        It is the latest step that an entry has and the table allows for its cosine. Nothing counts as used before
        :meth:`take`.
        """
        index = self._indexes.get(key)
        found = list[Beginning]()
        for near in [] if index is None else index.nearest(vector_of(embedding), rows + OVER):
            if near.cosine < table.least_cosine or len(found) == rows:
                break
            begins = self._begins(near, int(table.share(near.cosine) * steps + 1e-9))
            if begins is not None:
                found.append(begins)
        return (*found, *[None] * (rows - len(found)))

    def take(self, begins: Iterable[Beginning | None]) -> None:
        """Count these: a row begins there, or with noise."""
        for one in begins:
            if one is None:
                self.counts.misses += 1
                continue
            self.counts.hits += 1
            self.counts.saved_steps += one.step
            if (one.entry, one.step) in self._worth:
                self._worth.use((one.entry, one.step))

    def drop(self, tenant: str, template: str) -> Changes:
        """Forget all edits of a registered template."""
        gone = [e for e in self._entries.values() if (e.tenant, e.template) == (tenant, template)]
        return self._forgotten(gone)

    def lost(self, entry_id: str) -> Changes:
        """A latent of this entry could not be read."""
        entry = self._entries.get(entry_id)
        return Changes() if entry is None else self._forgotten([entry])

    def _begins(self, near: Near, most: int) -> Beginning | None:
        kept = [one for one in self._entries[near.entry_id].kept if one.step <= most]
        if not kept:
            return None
        best = max(kept, key=lambda one: one.step)
        return Beginning(
            entry=near.entry_id, step=best.step, latents=best.latents, cosine=min(1.0, round(near.cosine, 4))
        )

    def _forgotten(self, entries: Iterable[PromptEntry]) -> Changes:
        deleted, removed = list[BlobRef](), list[str]()
        for entry in entries:
            self._remove(entry)
            deleted += (one.latents for one in entry.kept)
            removed.append(entry.entry_id)
        return Changes(deleted=tuple(deleted), removed=tuple(removed))

    def _evicted(self, entry_id: str) -> Changes:
        """Let go of what is worth least until the rest fits; `entry_id` has just come."""
        deleted, changed = list[BlobRef](), dict[str, PromptEntry | None]()
        while self.size_bytes > self.budget_bytes and (least := self._worth.least()) is not None:
            name, step = least
            entry = self._entries[name]
            (one,) = (each for each in entry.kept if each.step == step)
            self._worth.remove(least)
            self.size_bytes -= one.latents.size_bytes
            self.counts.evicted += 1
            deleted.append(one.latents)
            changed[name] = self._without(entry, one)
        shrunk = tuple(entry for name, entry in changed.items() if entry is not None and name != entry_id)
        removed = tuple(name for name, entry in changed.items() if entry is None and name != entry_id)
        return Changes(tuple(deleted), self._entries.get(entry_id), shrunk, removed)

    def _without(self, entry: PromptEntry, one: KeptLatent) -> PromptEntry | None:
        """The entry without one of its latents; None where it was the last one."""
        kept = tuple(each for each in entry.kept if each != one)
        if not kept:
            self._remove(entry.model_copy(update={"kept": ()}))
            return None
        left = self._entries[entry.entry_id] = entry.model_copy(update={"kept": kept})
        return left

    def _remove(self, entry: PromptEntry) -> None:
        del self._entries[entry.entry_id]
        self.size_bytes -= entry.size_bytes
        for one in entry.kept:
            self._worth.remove((entry.entry_id, one.step))
        self._indexes[entry.key].remove(entry.entry_id)
        self._drop_empty(entry.key)

    def _drop_empty(self, key: str) -> None:
        if not len(self._indexes[key]):
            del self._indexes[key]


def vector_of(embedding: bytes) -> Vector:
    """The numbers of an embedding as they travel, of length 1."""
    values = np.frombuffer(embedding, dtype="<f2").astype(np.float32)
    return values / max(1e-12, float(np.linalg.norm(values)))


def embedding_of(values: Vector) -> bytes:
    """As they travel: float16, little endian, of length 1."""
    length = max(1e-12, float(np.linalg.norm(values)))
    return (values / length).astype("<f2").tobytes()
