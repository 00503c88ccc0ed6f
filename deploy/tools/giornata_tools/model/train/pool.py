"""Encoded scenes to draw batches from; each is used several times before a fresh one takes its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from diffusers import AutoencoderKL

from giornata_tools.model import latents
from giornata_tools.model.architecture import PATCH_CHANNELS, TEXT_TOKENS
from giornata_tools.model.scenes import sample
from giornata_tools.model.text import TextEncoders
from giornata_tools.model.train.stage import Ranks

FIRST: Final = {48: 2048, 64: 512, 96: 512, 128: 512, 256: 192}
"""Scenes encoded before the first batch, by side in pixels."""
CAPACITY: Final = {48: 30_000, 64: 8_000, 96: 10_000, 128: 8_000, 256: 1_200}
LEAST_MASK_PX: Final = {48: 25.0, 64: 25.0, 96: 25.0, 128: 24.0, 256: 24.0}
UNCONDITIONAL: Final = 0.1
"""Part of the captions that is dropped."""
ENCODE_AT_ONCE: Final = 32


@dataclass(frozen=True)
class SceneBatch:
    """What one step trains on. All (rows, ...)."""

    clean: torch.Tensor
    """(rows, tokens, 32) normalised latents of the answer."""
    condition: torch.Tensor
    """(rows, tokens, 96): latents of the masked picture, and the mask."""
    clip_ids: torch.Tensor
    t5_ids: torch.Tensor
    """(rows, text tokens) int64."""

    @property
    def masked(self) -> torch.Tensor:
        """(rows, tokens) bool: the mask touches the token."""
        return (self.condition[..., PATCH_CHANNELS:] > 0).any(-1)

    def to(self, device: torch.device) -> SceneBatch:
        """The same on `device`, in float32."""
        return SceneBatch(
            self.clean.float().to(device),
            self.condition.float().to(device),
            self.clip_ids.to(device),
            self.t5_ids.to(device),
        )

    def __getitem__(self, rows: torch.Tensor) -> SceneBatch:
        return SceneBatch(self.clean[rows], self.condition[rows], self.clip_ids[rows], self.t5_ids[rows])


@dataclass(frozen=True)
class Encoder:
    """What makes scenes a batch: the trained autoencoder and the tokenizers."""

    vae: AutoencoderKL
    text: TextEncoders

    def encode(self, pictures: torch.Tensor, masks: torch.Tensor, captions: list[str]) -> SceneBatch:
        """Pictures (rows, side, side, 3) uint8 and masks (rows, side, side) bool as a batch, stored in bfloat16."""
        device = next(self.vae.parameters()).device
        x = pictures.permute(0, 3, 1, 2).to(device).float() / 127.5 - 1
        mask = masks.to(device).float()
        clean, masked = (
            latents.pack(latents.encode(self.vae, part)) for part in (x, x * (1 - mask[:, None]))
        )
        condition = torch.cat([masked, latents.pack_mask(mask)], dim=-1)
        clip_ids, t5_ids = self.tokenize(captions)
        return SceneBatch(clean.bfloat16().cpu(), condition.bfloat16().cpu(), clip_ids, t5_ids)

    def tokenize(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """CLIP's and T5's ids, (captions, TEXT_TOKENS) each.

        CLIP pads to 77; its pooled output is that of the first end token, which sees nothing after it.
        """
        shape = {
            "padding": "max_length",
            "truncation": True,
            "max_length": TEXT_TOKENS,
            "return_tensors": "pt",
        }
        return (
            self.text.clip_tokenizer(captions, **shape).input_ids,
            self.text.t5_tokenizer(captions, **shape).input_ids,
        )


class ScenePool:
    """Scenes of one size. The same seed and the same calls give the same batches."""

    def __init__(
        self, encoder: Encoder, side: int, seed: int, *, rendered: int = 0, ranks: Ranks | None = None
    ) -> None:
        """Render and encode the first scenes.

        Args:
            encoder: of pictures and captions.
            side: of the pictures, in pixels.
            seed: of the scenes.
            rendered: scenes that this rank rendered before a restart.
            ranks: each renders its own.
        """
        self._encoder, self._side, self._seed = encoder, side, seed
        self._ranks = ranks = ranks or Ranks()
        self._rendered = rendered
        """Scenes that this rank rendered so far in the whole run: a restart goes on with new ones."""
        self._all = self._encode(FIRST[side] // ranks.count)
        self._oldest = 0

    @property
    def rendered(self) -> int:
        """Scenes that this rank rendered so far in the whole run."""
        return self._rendered

    def refresh(self, count: int) -> None:
        """Add `count` fresh scenes; when the pool is full they replace the oldest."""
        fresh = self._encode(count)
        if len(self._all.clean) < CAPACITY[self._side]:
            self._all = _concatenate([self._all, fresh])
            return
        end = min(self._oldest + count, len(self._all.clean))
        for mine, new in zip(_tensors(self._all), _tensors(fresh), strict=True):
            mine[self._oldest : end] = new[: end - self._oldest]
        self._oldest = end % len(self._all.clean)

    def draw(self, rows: int) -> SceneBatch:
        """A random batch, by torch's generator."""
        return self._all[torch.randint(len(self._all.clean), (rows,))]

    def _encode(self, count: int) -> SceneBatch:
        firsts = range(0, count, ENCODE_AT_ONCE)
        return _concatenate([self._render(min(ENCODE_AT_ONCE, count - first)) for first in firsts])

    def _render(self, count: int) -> SceneBatch:
        pictures, masks, captions = [], [], []
        for _ in range(count):
            number = self._rendered * self._ranks.count + self._ranks.rank
            rng = np.random.default_rng((self._seed, self._side, number))
            self._rendered += 1
            scene = sample(rng, self._side, least_mask_px=LEAST_MASK_PX[self._side])
            pictures.append(torch.from_numpy(scene.after))
            masks.append(torch.from_numpy(scene.mask.copy()))
            captions.append("" if rng.uniform() < UNCONDITIONAL else scene.caption)
        return self._encoder.encode(torch.stack(pictures), torch.stack(masks), captions)


def _tensors(batch: SceneBatch) -> tuple[torch.Tensor, ...]:
    return batch.clean, batch.condition, batch.clip_ids, batch.t5_ids


def _concatenate(parts: list[SceneBatch]) -> SceneBatch:
    columns = zip(*(_tensors(part) for part in parts), strict=True)
    return SceneBatch(*(torch.cat(column) for column in columns))
