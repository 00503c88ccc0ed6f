"""Which rows' latents are kept, by key and by prompt; what goes beyond the budget, or with its template.

It holds claim checks and embeddings, no latents: whoever uses it deletes what a
:class:`~giornata.approximate.entries.Gone` names. `now_s` is a clock that all routers share, since
entries outlive the router that added them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from giornata.approximate.entries import Gone, Hit, embedding_of, without
from giornata.approximate.eviction import Lcbfu
from giornata.approximate.nearest import Embedding, Nearest
from giornata.approximate.steps import step_of
from giornata.approximate.table import Table
from giornata.wire.prompts import PromptEntry

Kept = tuple[int, int]
"""An entry's number, and the step of one of its latents."""
MORE: Final = 8
"""Entries that are looked at beyond those that are asked for: some may have no latent of a step that pays."""


class PromptCache:
    """Entries by key, within `budget_bytes` of latents, each until its time has passed."""

    def __init__(self, budget_bytes: int) -> None:
        self._kept = Lcbfu[Kept](budget_bytes)
        self._numbers = itertools.count()
        self._entries: dict[int, PromptEntry] = {}
        self._ids: dict[str, int] = {}
        self._by_key: dict[str, Nearest] = {}
        self._by_template: dict[tuple[str, str], set[int]] = {}
        self.evicted = 0
        """Latents that went for want of room."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        """Bytes of all latents."""
        return self._kept.size_bytes

    def add(self, entry: PromptEntry, now_s: float) -> Gone:
        """Keep an entry, in place of one of its id; what goes for it, which may be itself."""
        embedding = embedding_of(entry.prompt_embedding)
        nearest = self._by_key.get(entry.key)
        if embedding is None or entry.until_s <= now_s or (nearest and nearest.numbers != len(embedding)):
            return Gone(tuple(latent.latents for latent in entry.kept), ended=(entry.entry_id,))
        if entry.entry_id in self._ids:
            self._forget(self._ids[entry.entry_id])
        number = next(self._numbers)
        self._entries[number], self._ids[entry.entry_id] = entry, number
        self._by_key.setdefault(entry.key, Nearest(len(embedding))).add(number, embedding)
        if entry.template_key:
            self._by_template.setdefault((entry.tenant, entry.template_key), set()).add(number)
        for latent in entry.kept:
            self._kept.add((number, latent.step), latent.latents.size_bytes, latent.step)
        gone = list(self._kept.evict())
        self.evicted += len(gone)
        return self._gone(gone)

    def find(
        self,
        key: str,
        embedding: Embedding,
        table: Table,
        steps: int,
        now_s: float,
        *,
        count: int = 1,
        taken: Collection[str] = (),
    ) -> list[Hit]:
        """At most `count` latents for rows of so many `steps`, of as many entries, the most alike first.

        `taken` are ids of entries that other rows of the job have begun with.
        """
        nearest, hits = self._by_key.get(key), list[Hit]()
        if nearest is None:
            return hits
        for number, cosine in nearest.nearest(embedding, count + len(taken) + MORE):
            entry = self._entries[number]
            if len(hits) == count or cosine < table.least_cosine:
                break
            if entry.entry_id in taken or entry.until_s <= now_s:
                continue
            most = step_of(table.share(cosine), steps)
            latent = max(
                (each for each in entry.kept if each.step <= most), key=lambda each: each.step, default=None
            )
            if latent is not None:
                hits.append(Hit(entry.entry_id, latent.step, min(1.0, cosine), latent.latents))
        return hits

    def use(self, hit: Hit, until_s: float) -> PromptEntry | None:
        """A row begins with a latent, whose entry is kept until then; the entry, None where it has gone meanwhile."""
        number = self._ids.get(hit.entry)
        if number is None or (number, hit.step) not in self._kept:
            return None
        self._kept.use((number, hit.step))
        entry = self._entries[number] = self._entries[number].model_copy(update={"until_s": until_s})
        return entry

    def lose(self, entry_id: str, step: int) -> Gone:
        """A latent was not to be had any more."""
        number = self._ids.get(entry_id)
        return Gone() if number is None else self._gone([(number, step)])

    def remove_template(self, tenant: str, template_key: str) -> Gone:
        """A picture's template was deleted: what was made of it goes along."""
        return self._whole(tuple(self._by_template.get((tenant, template_key), ())))

    def expire(self, now_s: float) -> Gone:
        """Forget the entries whose time has passed."""
        return self._whole([number for number, entry in self._entries.items() if entry.until_s <= now_s])

    def _whole(self, numbers: Iterable[int]) -> Gone:
        return self._gone([(number, each.step) for number in numbers for each in self._entries[number].kept])

    def _gone(self, gone: Iterable[Kept]) -> Gone:
        by_entry: dict[int, list[int]] = {}
        for number, step in gone:
            by_entry.setdefault(number, []).append(step)
        latents, changed, ended = [], [], []
        for number, steps in by_entry.items():
            entry = self._entries[number]
            latents += [each.latents for each in entry.kept if each.step in steps]
            left = self._entries[number] = without(entry, steps)
            for step in steps:
                self._kept.remove((number, step))
            if left.kept:
                changed.append(left)
            else:
                ended.append(entry.entry_id)
                self._forget(number)
        return Gone(tuple(latents), tuple(changed), tuple(ended))

    def _forget(self, number: int) -> None:
        entry = self._entries.pop(number)
        del self._ids[entry.entry_id]
        for latent in entry.kept:
            self._kept.remove((number, latent.step))
        nearest = self._by_key[entry.key]
        nearest.remove(number)
        if not len(nearest):
            del self._by_key[entry.key]
        place = entry.tenant, entry.template_key
        if place in self._by_template:
            self._by_template[place].discard(number)
            if not self._by_template[place]:
                del self._by_template[place]

    def entries(self) -> Iterator[PromptEntry]:
        """All entries, the oldest first."""
        return iter(tuple(self._entries.values()))
