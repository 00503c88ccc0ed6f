"""Rows that begin with another edit's latent, and latents that are kept for such rows (Nirvana, NSDI '24).

What is kept of a latent are the tokens that an edit of this picture and mask computes, in 16 bits: outside of them
every edit of it that reuses has the same latent at a level. An edit that reuses nothing keeps all tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from giornata import tensors
from giornata.packed.region import Region, region_of
from giornata.wire.approximate import kept_steps
from giornata.wire.errors import SchemaMismatch
from giornata.wire.messages import RunRequest
from giornata.wire.progress import RowRecord
from giornata.wire.requests import Approximate, Reuse
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.snapshot import LATENT, Snapshot
from giornata_denoiser.rows.track import Track

FOLDER: Final = "approximate"
"""Begins the keys of kept latents, which outlive their jobs."""
DTYPE: Final = torch.float16


class KeptLatents:
    """Latents of the rows of one attempt, until it is written down."""

    def __init__(self, request: RunRequest) -> None:
        asked = request.keeps_latents and request.job.parameters.approximate is not Approximate.OFF
        self._rows = {row.index for row in request.rows if asked and row.begins is None}
        self._kept: dict[int, dict[int, Tensor]] = {}

    def take(self, row: Row) -> None:
        """Keep the latent of a row that a step has advanced, if it is one of those that are kept."""
        if (
            row.key.index not in self._rows
            or row.step not in kept_steps(row.steps)
            or not begins_anywhere(row.track)
        ):
            return
        latent = row.latent.detach()
        # a pool's rows lie in memory that its next steps write to
        self._kept.setdefault(row.key.index, {})[row.step] = (
            latent.clone() if latent.device.type == "cpu" else latent
        )

    def of(self, index: int) -> Mapping[int, Tensor]:
        """Latents of a row, (tokens, channels), by the steps that had been computed."""
        return self._kept.get(index, {})


def begins_anywhere(track: Track) -> bool:
    """Whether a latent is all that a step takes from earlier ones: no memory of the solver, no random numbers."""
    return not track.remembered and not any(track.draws)


def kept_region(request: RunRequest) -> Region | None:
    """The part of an edit's latent that is kept; None for all of it."""
    found = request.inspection.compute_set
    if request.job.parameters.reuse is Reuse.OFF or found is None:
        return None
    return region_of(found[1])


def packed(latent: Tensor, region: Region | None) -> bytes:
    """safetensors of what is kept of a latent (tokens, channels)."""
    kept = latent if region is None else latent.index_select(0, region.on(latent.device).computed)
    return tensors.pack({LATENT: kept.to("cpu", DTYPE)})


def new_key(tenant: str) -> str:
    """A key that no other latent has."""
    return f"{FOLDER}/{tenant}/{secrets.token_hex(12)}"


def begun(
    row: RowRecord,
    data: bytes | None,
    conditioning: Mapping[str, Tensor],
    track: Track,
    region: Region | None,
) -> Snapshot | None:
    """Where a row begins with the latent in `data`; None where it begins with noise.

    Args:
        row: as the router asks for it.
        data: what :func:`packed` has made.
        conditioning: of the row: `noise` and, where it has a picture, `image_latents`, (tokens, channels).
        track: of the row.
        region: see :func:`kept_region`.

    Raises:
        SchemaMismatch: the latent does not fit the row.
    """
    if row.begins is None or data is None:
        return None
    step, kept = row.begins.step, tensors.unpack(data).get(LATENT)
    noise = conditioning["noise"]
    wanted = (noise.shape[0] if region is None else len(region.computed), noise.shape[1])
    if kept is None or tuple(kept.shape) != wanted or not 0 < step < track.steps:
        raise SchemaMismatch(
            "A kept latent does not fit the row that begins with it.",
            received=f"{None if kept is None else tuple(kept.shape)} after {step} steps",
            accepted=f"{wanted} after 1 to {track.steps - 1} steps",
        )
    if region is None:
        return Snapshot(step, kept.float())
    latent = track.noised(conditioning["image_latents"].float(), noise.float(), step)
    latent[region.computed] = kept.float()
    return Snapshot(step, latent)
