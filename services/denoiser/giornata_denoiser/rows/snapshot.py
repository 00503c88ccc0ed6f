"""A row's state as it travels from worker to worker. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from giornata.wire.errors import RowPoisoned, SchemaMismatch

LATENT: Final = "latents"
MEMORY: Final = "memory"
GENERATOR: Final = "generator"
"""Names of a row's state where it travels; the last one also that of its generator's where its inputs do."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What a step changes of a row: with its inputs, enough to go on elsewhere."""

    step: int
    """Steps already computed."""
    latent: Tensor
    """(tokens, channels) float32 on the CPU; holds every bfloat16 value exactly."""
    memory: Tensor | None = None
    """(states, tokens, channels) float32: what the solver remembers of earlier steps; None for one-step samplers."""
    generator: Tensor | None = None
    """Where the row's random numbers go on, as :attr:`Row.generator`."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, as they travel."""
        named = {LATENT: self.latent, MEMORY: self.memory, GENERATOR: self.generator}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @classmethod
    def of(cls, step: int, tensors: Mapping[str, Tensor]) -> Self:
        """The snapshot that travelled as `tensors`.

        Raises:
            SchemaMismatch: there is no latent.
        """
        if LATENT not in tensors:
            raise SchemaMismatch("A row's state holds no latents.", received=", ".join(tensors) or "none")
        return cls(step, tensors[LATENT], tensors.get(MEMORY), tensors.get(GENERATOR))


def exported(state: Tensor) -> Tensor:
    """A copy on the CPU; RowPoisoned if it is not finite."""
    exported = state.detach().to("cpu", torch.float32, copy=True)
    if not bool(exported.isfinite().all()):
        raise RowPoisoned
    return exported
