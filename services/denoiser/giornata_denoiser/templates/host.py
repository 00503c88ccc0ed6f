"""Where templates and corrections lie in host memory, so that devices, or other processes, read them there. Pure."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Final, NamedTuple

from giornata_denoiser.rows.correction import Correction
from giornata_denoiser.rows.template import CachedTemplate


class HostMemory(NamedTuple):
    """Puts what is kept where it is to lie. May copy, and so take long; safe in several threads."""

    recording: Callable[[CachedTemplate], CachedTemplate]
    correction: Callable[[Correction], Correction]


ORDINARY: Final = HostMemory(lambda recording: recording, lambda correction: correction)
"""As it comes: mapped from a file, or as a step has left it."""
PINNED: Final = HostMemory(methodcaller("pinned"), methodcaller("pinned"))
"""Pinned memory, from which a CUDA device reads asynchronously."""
