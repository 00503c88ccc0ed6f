"""Encoded scenes to draw batches from; each is used several times before a fresh one takes its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import torch
from diffusers import AutoencoderKL

from giornata_lab.model import latents
from giornata_lab.model.scenes import Scene, sample

FIRST: Final = {48: 2048, 64: 512, 96: 512, 128: 512, 256: 192}
"""Scenes encoded before the first batch, by side in pixels."""
CAPACITY: Final = {48: 30_000, 64: 8_000, 96: 10_000, 128: 8_000, 256: 1_200}
LEAST_MASK_PX: Final = {48: 25.0, 64: 25.0, 96: 25.0, 128: 24.0, 256: 24.0}
UNCONDITIONAL: Final = 0.1
"""Part of the captions that is dropped."""
ENCODE_AT_ONCE: Final = 32


@dataclass(frozen=True)
class SceneBatch:
    """What one step trains on. All (rows, ...); places are tokens of a transformer or latent pixels of a UNet."""

    clean: torch.Tensor
    """Normalised latents of the answer."""
    condition: torch.Tensor
    """What the network sees beside the noisy latents: latents of the masked picture, and the mask."""
    masked: torch.Tensor
    """(rows, places) bool: the mask touches the place."""
    token_ids: tuple[torch.Tensor, ...]
    """(rows, text tokens) int64 of each tokenizer."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, in this order."""
        return self.clean, self.condition, self.masked, *self.token_ids

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> SceneBatch:
        """The batch whose `tensors` these are."""
        clean, condition, masked, *token_ids = tensors
        return SceneBatch(clean, condition, masked, tuple(token_ids))

    def to(self, device: torch.device) -> SceneBatch:
        """The same on `device`; latents in float32."""
        return SceneBatch(
            self.clean.float().to(device),
            self.condition.float().to(device),
            self.masked.to(device),
            tuple(ids.to(device) for ids in self.token_ids),
        )

    def __getitem__(self, rows: torch.Tensor) -> SceneBatch:
        return SceneBatch.of([tensor[rows] for tensor in self.tensors])


class SceneEncoder(Protocol):
    """What makes scenes a batch: a trained autoencoder and the tokenizers of one model."""

    @property
    def vae(self) -> AutoencoderKL:
        """The autoencoder."""

    def encode(self, scenes: Sequence[Scene]) -> SceneBatch:
        """A batch on the CPU, latents stored in bfloat16; scenes are of one size."""

    def tokenize(self, captions: list[str]) -> tuple[torch.Tensor, ...]:
        """The ids (captions, text tokens) of each tokenizer."""


SceneSource = Callable[[np.random.Generator, int], Scene]
"""A random scene of so many pixels a side."""


def usual(rng: np.random.Generator, side: int) -> Scene:
    """Return what the models that ship learn from."""
    return sample(rng, side, least_mask_px=LEAST_MASK_PX[side])


def as_input(pictures: torch.Tensor, vae: AutoencoderKL) -> torch.Tensor:
    """(rows, side, side, 3) uint8 → (rows, 3, side, side) in [-1, 1], on the autoencoder's device."""
    device = next(vae.parameters()).device
    return pictures.permute(0, 3, 1, 2).to(device).float() / 127.5 - 1


def masks_of(scenes: Sequence[Scene]) -> torch.Tensor:
    """(scenes, side, side) bool."""
    return torch.from_numpy(np.stack([scene.mask for scene in scenes]))


def encode_both(vae: AutoencoderKL, scenes: Sequence[Scene]) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised latents (rows, channels, height, width) of the answers, and of them with the mask blanked."""
    x = as_input(torch.from_numpy(np.stack([scene.after for scene in scenes])), vae)
    blanked = x * ~masks_of(scenes).to(x.device)[:, None]
    return latents.encode(vae, x), latents.encode(vae, blanked)


class ScenePool:
    """Scenes of one size. The same seed and the same calls give the same batches."""

    def __init__(
        self,
        encoder: SceneEncoder,
        side: int,
        seed: int,
        *,
        rendered: int = 0,
        source: SceneSource = usual,
    ) -> None:
        """Render and encode the first scenes.

        Args:
            encoder: of pictures and captions.
            side: of the pictures, in pixels.
            seed: of the scenes.
            rendered: scenes that were rendered before a restart.
            source: of the scenes.
        """
        self._encoder, self._side, self._seed, self._source = encoder, side, seed, source
        self.rendered = rendered
        """Scenes that were rendered so far in the whole run: a restart goes on with new ones."""
        self._all = self._encode(FIRST[side])
        self._oldest = 0

    def refresh(self, count: int) -> None:
        """Add `count` fresh scenes; when the pool is full they replace the oldest."""
        fresh = self._encode(count)
        if len(self._all.clean) < CAPACITY[self._side]:
            self._all = _concatenate([self._all, fresh])
            return
        end = min(self._oldest + count, len(self._all.clean))
        for mine, new in zip(self._all.tensors, fresh.tensors, strict=True):
            mine[self._oldest : end] = new[: end - self._oldest]
        self._oldest = end % len(self._all.clean)

    def draw(self, rows: int) -> SceneBatch:
        """A random batch, by torch's generator."""
        return self._all[torch.randint(len(self._all.clean), (rows,))]

    def _encode(self, count: int) -> SceneBatch:
        firsts = range(0, count, ENCODE_AT_ONCE)
        return _concatenate([self._render(min(ENCODE_AT_ONCE, count - first)) for first in firsts])

    def _render(self, count: int) -> SceneBatch:
        scenes = []
        for _ in range(count):
            rng = np.random.default_rng((self._seed, self._side, self.rendered))
            self.rendered += 1
            scene = self._source(rng, self._side)
            scenes.append(replace(scene, caption="") if rng.uniform() < UNCONDITIONAL else scene)
        return self._encoder.encode(scenes)


def _concatenate(parts: list[SceneBatch]) -> SceneBatch:
    columns = zip(*(part.tensors for part in parts), strict=True)
    return SceneBatch.of([torch.cat(column) for column in columns])
