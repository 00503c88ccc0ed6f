"""Latents between a row's steps that rows with similar prompts may begin with: of the tokens that it paints. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from giornata.packed.region import Region
from giornata.wire.errors import SchemaMismatch

DTYPE: Final = torch.float16
"""Holds every bfloat16 value of a latent; a quarter of the bytes of a state that is handed over whole in float32."""


@dataclass(frozen=True, eq=False)
class Keeping:
    """After which steps a row's latent is kept, and of which tokens."""

    steps: frozenset[int]
    """Steps computed."""
    where: Region | None
    """None for all tokens."""

    def of(self, step: int, latent: Tensor) -> tuple[tuple[int, Tensor], ...]:
        """What is kept of `latent`, (tokens, channels), after so many steps: a copy, where it is."""
        if step not in self.steps:
            return ()
        tokens = (
            latent if self.where is None else latent.index_select(0, self.where.on(latent.device).computed)
        )
        return ((step, tokens.detach().to(DTYPE, copy=True)),)


def completed(kept: Tensor, where: Region | None, outside: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """The latent of `shape`, (tokens, channels), that a row begins with.

    It is `kept` at the tokens of `where` and as an edit has the picture, `outside`, at all others.

    Raises:
        SchemaMismatch: `kept` are not so many tokens.
    """
    wanted = shape if where is None else (len(where.computed), *shape[1:])
    if tuple(kept.shape) != tuple(wanted) or not bool(kept.isfinite().all()):
        raise SchemaMismatch(
            "A kept latent does not fit the row.",
            received=str(tuple(kept.shape)),
            accepted=str(tuple(wanted)),
        )
    if where is None:
        return kept
    if outside is None:
        raise SchemaMismatch("A kept latent of some tokens needs a picture.", received="none")
    whole = outside.clone()
    whole[where.computed] = kept.to(whole.dtype)
    return whole
