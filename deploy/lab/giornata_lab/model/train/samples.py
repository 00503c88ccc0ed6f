"""Grids of edits to look at while training runs: before with the mask, the edit, the true picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image

from giornata_lab.model import latents
from giornata_lab.model.scenes import Scene, sample
from giornata_lab.model.train.pool import SceneBatch, SceneEncoder, SceneSource

SEED: Final = 7_000_000
COLUMNS: Final = 12


def typical(rng: np.random.Generator, side: int) -> Scene:
    """A scene of any task."""
    return sample(rng, side, least_mask_px=24.0)


def fixed_noise(like: torch.Tensor) -> torch.Tensor:
    """The same noise each time, of the shape and on the device of `like`."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like.device)


def show(
    paint: Callable[[SceneBatch], torch.Tensor],
    encoder: SceneEncoder,
    path: Path,
    side: int,
    source: SceneSource = typical,
) -> None:
    """Write a grid of the same 24 scenes each time; captions beside it as text.

    Args:
        paint: latents (rows, channels, height, width) of the edits of a batch.
        encoder: makes scenes a batch.
        path: of the picture.
        side: of the scenes, in pixels.
        source: of the scenes.
    """
    scenes = [source(np.random.default_rng((SEED, i)), side) for i in range(2 * COLUMNS)]
    truth = torch.from_numpy(np.stack([scene.after for scene in scenes]))
    masks = torch.from_numpy(np.stack([scene.mask for scene in scenes]))
    device = next(encoder.vae.parameters()).device
    batch = encoder.encode(scenes).to(device)
    painted = latents.decode(encoder.vae, paint(batch))
    painted = ((painted + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu()
    edited = torch.where(masks[..., None], painted, truth)
    shown = torch.where(masks[..., None], truth // 4 + 150, truth)
    bands = [
        torch.cat(list(rows[first : first + COLUMNS]), dim=1)
        for first in (0, COLUMNS)
        for rows in (shown, edited, truth)
    ]
    Image.fromarray(torch.cat(bands).numpy()).save(path)
    path.with_suffix(".txt").write_text("\n".join(scene.caption for scene in scenes), encoding="utf-8")
