"""Flux.2 Klein-KV: `Flux2Transformer2DModel` with block-causal references, as in `Flux2KleinKVPipeline`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional

from giornata.packed.region import Rotary
from giornata_denoiser.families.driven.batch import Grid
from giornata_denoiser.families.driven.flux2 import REFERENCE, Flux2Klein
from giornata_denoiser.families.driven.positions import cells, numbered
from giornata_denoiser.families.driven.prefix import Prefix
from giornata_denoiser.families.driven.prompts import DrivenPrompt
from giornata_denoiser.families.rows import references_of
from giornata_denoiser.rows.row import Prompt


class Flux2KleinKV(Flux2Klein):
    """Klein, whose references attend to each other alone: a prefix, and no companions.

    An edit's own picture is its first reference; a generation has those of its request alone.
    """

    def companions(self, grid: Grid, *, generated: bool = False) -> int:  # noqa: ARG002 - protocol
        """None: references are the prefix."""
        return 0

    def prefix_tokens(self, prompt: Prompt, conditioning: Mapping[str, Tensor]) -> int:  # noqa: ARG002 - protocol
        """Those of all references."""
        own = conditioning.get("image_latents")
        given = sum(latents.shape[0] * latents.shape[1] for latents in references_of(conditioning))
        return given + (0 if own is None else len(own))

    def prefix(self, prompt: DrivenPrompt, conditioning: Mapping[str, Tensor]) -> Prefix:
        """The references, each at its place on the first axis: 10, 20 and so on."""
        found = references_of(conditioning)
        if "image_latents" in conditioning:
            found.insert(0, conditioning["image_latents"].view(*prompt.grid, -1))
        places = [
            functional.pad(cells((latents.shape[0], latents.shape[1]), self.device), (1, 1)) + self._at(axis)
            for latents, axis in zip(found, count(REFERENCE, REFERENCE), strict=False)
        ]
        rotary: Rotary = self.transformer.pos_embed(torch.cat(places))
        clean = torch.cat([latents.flatten(0, 1) for latents in found])
        return Prefix(self.image_stream(clean), rotary, self._attend)

    def rotated(self, text_tokens: int, grid: Grid) -> Rotary:
        """Text and picture: see :class:`Flux2Klein`."""
        text = numbered(text_tokens, self.device, axis=3, axes=4)
        picture = functional.pad(cells(grid, self.device), (1, 1))
        turned: Rotary = self.transformer.pos_embed(torch.cat((text, picture)))
        return turned

    def _at(self, axis: int) -> Tensor:
        """(4,) int64: how far a reference lies from the picture."""
        return torch.tensor([axis, 0, 0, 0], device=self.device)
