"""Intermediate results of a job in the blob store: their keys, an inspection with claim checks, a row's latents."""

from __future__ import annotations

import secrets

import torch

from giornata import tensors
from giornata.blobs import BlobStore
from giornata.wire.errors import InputLost
from giornata.wire.jobs import BlobRef, Inspection, Job
from giornata.wire.messages import FinishRequest
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.stages import Inspected


def new_key(folder: str, name: str) -> str:
    """A key that no other call has.

    A stage that is tried again may differ in the last digit, and an earlier claim check keeps its bytes.
    """
    return f"{folder}{name}-{secrets.token_hex(4)}"


def model_size(inspection: Inspection) -> Size:
    """Pixels of the picture that the model sees."""
    return Size(inspection.model_width, inspection.model_height)


async def store_intermediate(blobs: BlobStore, job: Job, name: str, data: bytes) -> BlobRef:
    """Store what the job's next stages read, for as long as an intermediate result is kept."""
    return await blobs.put(new_key(job.folder, name), data, job.intermediate_ttl_s)


def inspection_of(found: Inspected, compute_ms: float, **stored: BlobRef | None) -> Inspection:
    """The measures for the router, with claim checks instead of blobs: `stored`, by the names of these."""
    blobs = dict.fromkeys(("prepared", "alpha", "references", "controls")) | stored
    return Inspection.model_validate(vars(found) | blobs | {"compute_ms": compute_ms})


def latents_of(data: bytes, request: FinishRequest) -> torch.Tensor:
    """`latents` (tokens, 4 * latent_channels) of a row's blob."""
    latents = tensors.unpack(data).get("latents")
    if latents is None or latents.ndim != 2 or latents.shape[0] != request.inspection.tokens:
        received = "no latents" if latents is None else f"latents of shape {tuple(latents.shape)}"
        raise InputLost("A blob does not hold this row's latents.", received=received)
    return latents
