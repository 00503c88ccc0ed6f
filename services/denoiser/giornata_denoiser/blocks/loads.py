"""Loads: slabs to be gathered ahead of their use, by :mod:`giornata_denoiser.loading.loader`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from giornata.wire.values import Mode
from giornata_denoiser.blocks.slabs import Slabs


class SlabLoad(NamedTuple):
    """One slab to be loaded."""

    slabs: Slabs
    block: int
    mode: Mode


class Loaded(NamedTuple):
    """When a slab was loaded."""

    load: SlabLoad
    size_bytes: int
    """Bytes that moved."""
    began_s: float
    ended_s: float


class LoadsAhead(Protocol):
    """Loads in an order that may change at every step."""

    @property
    def under_way(self) -> SlabLoad | None:
        """The load that has begun and not ended."""

    def schedule(self, loads: Iterable[SlabLoad]) -> None:
        """Load these, in this order, and nothing else that was scheduled and has not begun."""
