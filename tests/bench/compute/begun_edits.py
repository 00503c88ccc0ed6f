"""Edits by diffusers' pipeline that begin with another edit's latent, as with the approximate prompt cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image

from giornata.approximate.cache import embedding_of, vector_of
from giornata.approximate.index import Vector
from giornata_tools.model.adapters.judging import GUIDANCE
from giornata_tools.model.architecture import TEXT_TOKENS
from giornata_tools.model.painting import Pixels, fill_pipeline
from giornata_tools.model.scenes import masks
from giornata_tools.quality.cases import Case

Latents = dict[int, torch.Tensor]
"""(edits, tokens, channels) float32, by steps computed."""


class BegunEdits:
    """The shipped kind of model in diffusers, float32.

    Args:
        checkpoint: folder of a Flux-Fill model.
        steps: of an edit that makes all.
    """

    def __init__(self, checkpoint: Path, steps: int) -> None:
        self.steps = steps
        self._pipeline = fill_pipeline(checkpoint)
        self._sigmas = np.linspace(1.0, 1 / steps, steps)
        self._embeddings: dict[str, Vector] = {}

    def painted(
        self,
        cases: Sequence[Case],
        prompts: Sequence[str],
        seeds: Sequence[int],
        begun: tuple[int, torch.Tensor] | None = None,
    ) -> list[Pixels]:
        """Pictures (side, side, 3), one a case.

        Args:
            cases: of one size.
            prompts: of each.
            seeds: of their noise, which is not used where they begin with latents.
            begun: steps that are not made, and the latents (edits, tokens, channels) after them.
        """
        first, latents = begun or (0, None)
        found = self._called(cases, prompts, seeds, first, latents=latents)
        return [
            np.where(case.scene.mask[..., None], np.asarray(picture), case.scene.before)
            for case, picture in zip(cases, found, strict=True)
        ]

    def latents(
        self, cases: Sequence[Case], prompts: Sequence[str], seeds: Sequence[int], after: Collection[int]
    ) -> Latents:
        """What edits have after these numbers of steps; those beyond the last one are not made."""
        kept: Latents = {}

        def keep(pipeline: Any, step: int, _timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            if step + 1 in after:
                kept[step + 1] = values["latents"].clone()
            pipeline._interrupt = step + 1 >= max(after)
            return {}

        self._called(cases, prompts, seeds, callback_on_step_end=keep, output_type="latent")
        return kept

    def cosine(self, prompt: str, other: str) -> float:
        """Of both prompts' embeddings, as prepost makes them and as they travel."""
        return float(self._embedding(prompt) @ self._embedding(other))

    def _embedding(self, prompt: str) -> Vector:
        if prompt not in self._embeddings:
            with torch.inference_mode():
                _, pooled, _ = self._pipeline.encode_prompt(prompt, prompt, max_sequence_length=TEXT_TOKENS)
            self._embeddings[prompt] = vector_of(embedding_of(pooled[0].float().numpy()))
        return self._embeddings[prompt]

    def _called(
        self, cases: Sequence[Case], prompts: Sequence[str], seeds: Sequence[int], first: int = 0, **more: Any
    ) -> Sequence[Any]:
        """What the pipeline makes, from step `first` on."""
        side = cases[0].slot.side
        made: Sequence[Any] = self._pipeline(
            prompt=list(prompts),
            image=[Image.fromarray(case.scene.before) for case in cases],
            mask_image=[masks.image(case.scene.mask) for case in cases],
            height=side,
            width=side,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            num_inference_steps=self.steps - first,
            sigmas=self._sigmas[first:].tolist(),
            guidance_scale=GUIDANCE,
            max_sequence_length=TEXT_TOKENS,
            **more,
        ).images
        return made


@contextmanager
def posterior_modes() -> Iterator[None]:
    """Diffusers draws a picture's posterior with the noise's generator; here it takes the mode, as the engine does."""
    drawn = DiagonalGaussianDistribution.sample
    DiagonalGaussianDistribution.sample = lambda self, generator=None: self.mode()
    try:
        yield
    finally:
        DiagonalGaussianDistribution.sample = drawn
