"""What a template run left behind: entries by noise level, each with what its blocks kept. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from giornata.wire.values import Mode
from giornata_denoiser.rows.stored import Stored

FILE_BYTES: Final = 512
"""Most that a template's file takes for one tensor of a block beside its bytes."""


class Form(StrEnum):
    """What a block keeps of every token."""

    KV = "kv"
    """Keys, after norm and rotary embedding, and values."""
    HIDDEN = "hidden"
    """The block's input: half the bytes, projected again by every edit."""


@dataclass(frozen=True, eq=False)
class Kept:
    """What one block kept at one noise level: all, one form, or nothing."""

    key: Stored | None = None
    """(tokens, heads * head_dim)"""
    value: Stored | None = None
    """As `key`."""
    hidden: Stored | None = None
    """(tokens, inner_dim)"""

    def pinned(self) -> Kept:
        """In pinned host memory."""
        return Kept(*(p and p.pinned() for p in (self.key, self.value, self.hidden)))

    def taken(self, mode: Mode) -> tuple[Stored, ...]:
        """What a block that runs in `mode` takes, of what there is."""
        parts = {Mode.KV: (self.key, self.value), Mode.HIDDEN: (self.hidden,), Mode.FULL: ()}[mode]
        return tuple(part for part in parts if part is not None)

    @property
    def parts(self) -> Iterator[Stored]:
        """Whatever there is."""
        return (part for part in (self.key, self.value, self.hidden) if part is not None)


@dataclass(frozen=True, eq=False)
class Entry:
    """One noise level of a template run."""

    sigma: float
    blocks: tuple[Kept, ...]

    def pinned(self) -> Entry:
        """In pinned host memory."""
        return replace(self, blocks=tuple(block.pinned() for block in self.blocks))

    @property
    def size_bytes(self) -> int:
        """Of all that its blocks kept."""
        return sum(part.size_bytes for block in self.blocks for part in block.parts)


@dataclass(frozen=True, eq=False)
class Template:
    """The entries of one template run."""

    id: str
    grid: tuple[int, int]
    """Height and width in tokens."""
    entries: tuple[Entry, ...]
    """In the order of the run, sigma falling."""

    @property
    def size_bytes(self) -> int:
        """Of all entries."""
        return sum(entry.size_bytes for entry in self.entries)

    def pinned(self) -> Template:
        """In pinned host memory; see :meth:`giornata_denoiser.rows.stored.Stored.pinned`."""
        return replace(self, entries=tuple(entry.pinned() for entry in self.entries))

    def at(self, sigma: float, tolerance: float = 1.0) -> Entry | None:
        """The entry of the nearest noise level; None if none lies within `tolerance`."""
        nearest = min(self.entries, key=lambda entry: abs(entry.sigma - sigma), default=None)
        return None if nearest is None or abs(nearest.sigma - sigma) > tolerance else nearest
