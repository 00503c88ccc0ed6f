"""Loads: slabs to be gathered ahead of their use. Pure; :mod:`giornata_denoiser.blocks.loader` does it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from giornata.wire.values import Mode
from giornata_denoiser.blocks.slabs import Slabs


class Load(NamedTuple):
    """One slab to be loaded."""

    slabs: Slabs
    block: int
    mode: Mode


class Loaded(NamedTuple):
    """When one was."""

    load: Load
    size_bytes: int
    """Moved."""
    began_s: float
    ended_s: float


class LoadsAhead(Protocol):
    """Loads in an order that may change at every step."""

    @property
    def under_way(self) -> Load | None:
        """What has begun and not ended."""

    def schedule(self, loads: Iterable[Load]) -> None:
        """Load these, in this order, and nothing else that was scheduled and has not begun."""
