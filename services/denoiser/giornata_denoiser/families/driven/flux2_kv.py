"""Flux.2 Klein-KV: `Flux2Transformer2DModel` with block-causal references, as in `Flux2KleinKVPipeline`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from giornata.packed.region import Rotary
from giornata_denoiser.families.driven.flux2 import Flux2Klein
from giornata_denoiser.families.driven.prefix import Prefix
from giornata_denoiser.families.driven.prompts import DrivenPrompt
from giornata_denoiser.families.references import Grid, area
from giornata_denoiser.rows.row import Prompt


class Flux2KleinKV(Flux2Klein):
    """Klein, whose references attend to each other alone: a prefix, and no companions.

    An edit's own picture is its first reference; a generation has those of its request alone.
    """

    def companions(self, grid: Grid, given: Sequence[Grid] = (), *, generated: bool = False) -> int:  # noqa: ARG002 - protocol
        """None: references are the prefix."""
        return 0

    def prefix_tokens(self, prompt: Prompt, beside: Sequence[Grid]) -> int:  # noqa: ARG002 - protocol
        """Those of all references."""
        return area(beside)

    def prefix(
        self,
        prompt: DrivenPrompt,  # noqa: ARG002 - protocol
        conditioning: Mapping[str, Tensor],
        beside: Sequence[Grid],
    ) -> Prefix:
        """The references, each at its place on the first axis."""
        places = [self.places(grid, nth) for nth, grid in enumerate(beside, 1)]
        rotary: Rotary = self.transformer.pos_embed(torch.cat(places))
        clean = self.references.tokens(conditioning)
        if clean is None:
            raise ValueError(f"received no clean latents of references, expected those of {beside}")
        return Prefix(self.image_stream(clean), rotary, self._attend)

    def rotated(self, text_tokens: int, grid: Grid, beside: tuple[Grid, ...]) -> Rotary:  # noqa: ARG002 - a prefix
        """Text and picture: see :class:`Flux2Klein`."""
        return super().rotated(text_tokens, grid, ())
