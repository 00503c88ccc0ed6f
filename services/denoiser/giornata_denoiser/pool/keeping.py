"""Templates and corrections in memory that all ranks map: put there once, when they are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from giornata_denoiser.pool.memory import Arena
from giornata_denoiser.rows.correction import Correction
from giornata_denoiser.rows.template import CachedTemplate
from giornata_denoiser.templates.host import HostMemory

T = TypeVar("T")


def shared_memory(arena: Arena) -> HostMemory:
    """The memory of `arena`: what lies there already, as ranks leave it, stays where it is. OSError without room."""

    def recording(given: CachedTemplate) -> CachedTemplate:
        return _shared(arena, given, _each_of_recording)

    def correction(given: Correction) -> Correction:
        return _shared(arena, given, _each_of_correction)

    return HostMemory(recording, correction)


def _shared(arena: Arena, given: T, each: Callable[[T, Callable[[Tensor], Tensor]], T]) -> T:
    found: list[Tensor] = []

    def seen(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    each(given, seen)
    if all(arena.place_of(tensor) is not None for tensor in found):
        return given
    copies = dict(zip(map(id, found), arena.all_shared(found), strict=True))
    return each(given, lambda tensor: copies[id(tensor)])


def _each_of_recording(given: CachedTemplate, change: Callable[[Tensor], Tensor]) -> CachedTemplate:
    return replace(
        given,
        entries=tuple(
            replace(entry, blocks=tuple(kept.each(change) for kept in entry.blocks))
            for entry in given.entries
        ),
    )


def _each_of_correction(given: Correction, change: Callable[[Tensor], Tensor]) -> Correction:
    return Correction({place: delta.each(change) for place, delta in given.deltas.items()})
