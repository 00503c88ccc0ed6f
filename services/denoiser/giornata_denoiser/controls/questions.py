"""What an instance is told of a row when it is opened there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from giornata.control.expansion import Behind, sequences, summed
from giornata.wire.control_steps import ALIGNMENT_BYTES
from giornata.wire.controlnets import ControlBase, DataPath, OpenControl
from giornata.wire.messages import RunRequest
from giornata.wire.values import CellMap
from giornata_denoiser.rows.row import Row

STEPS: Final = 2
"""For so many of its steps a row has room on the data path: a place that is free lies between others."""


@dataclass(frozen=True)
class ControlClientInfo:
    """The denoiser that asks."""

    base: ControlBase
    denoiser: str
    host: str
    """See :attr:`giornata.wire.controlnets.OpenControl.host`."""
    paths: tuple[DataPath, ...]
    """What it can use, the best one first."""
    dtype: torch.dtype
    """The dtype of latents and samples."""


def room_bytes(asking: ControlClientInfo, row: Row, behind: Sequence[Behind]) -> int:
    """Bytes that a row takes of a data path; `behind` is by ControlNet."""
    base = asking.base
    sums = summed(behind)
    channels = sum(base.channels[block] for block in sums.first)
    tokens = sequences(base.kind, len(row.prompts)) * row.image_tokens
    places = len(sums.parts) + 1
    step = (tokens * channels + row.latent.numel()) * asking.dtype.itemsize + places * ALIGNMENT_BYTES
    return STEPS * step


def question(
    asking: ControlClientInfo, request: RunRequest, row: Row, paths: tuple[DataPath, ...], remaining_ms: int
) -> OpenControl:
    """The message."""
    controls = row.adapters.controls
    return OpenControl(
        job=request.job,
        attempt=request.attempt,
        index=row.key.index,
        inspection=request.inspection,
        encoding=request.encoding,
        base=asking.base,
        grid=row.grid,
        times=tuple(row.track.times.tolist()),
        sequences=len(row.prompts),
        acting=tuple((use.first_step, use.end_step) for use in controls),
        computed=None if row.region is None else cells(row.region.computed, row.grid),
        denoiser=asking.denoiser,
        host=asking.host,
        paths=paths,
        remaining_ms=remaining_ms,
    )


def cells(computed: torch.Tensor, grid: tuple[int, int]) -> CellMap:
    """Tokens of a picture, (computed,) int64, as they travel; :func:`giornata.packed.region.region_of` reads them."""
    height, width = grid
    flat = torch.zeros(height * width, dtype=torch.bool)
    flat[computed.cpu()] = True
    return CellMap(height=height, width=width, bits=np.packbits(flat.numpy()).tobytes())
