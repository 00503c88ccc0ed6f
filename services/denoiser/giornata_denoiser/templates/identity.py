"""What a template is called: a digest of all that its recording follows from. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from giornata.planning.keeping import LEAST_LEVELS, Keeping, within
from giornata.wire.jobs import Inspection
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.templates import digest_of, picture_id
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.rows.sigmas import SigmaGrid, sigma_grid
from giornata_denoiser.rows.stored import EXACT
from giornata_denoiser.rows.template import FILE_BYTES, Form

RECORDER: Final = 1
"""Version of what template runs record; another one's are not taken from."""
ANYWHERE: Final = 1.0
SAME: Final = 1e-4
"""Tolerances of noise levels."""


@dataclass(frozen=True)
class Wanted:
    """A template that is taken from, or recorded."""

    id: str
    """A picture's, and after it a recording's: see :func:`giornata.wire.templates.picture_id`."""
    grid: SigmaGrid
    """Noise levels of its run."""
    tolerance: float
    first_block: int = 0
    """Blocks before it keep nothing, for want of bytes."""


def wanted(
    config: DenoiserConfig,
    checkpoint: Checkpoint,
    tenant: str,
    inspection: Inspection,
    parameters: EditParameters | None = None,
) -> Wanted:
    """The template of a picture: its tenant's own.

    Args:
        config: form, bits and noise levels of recordings, and how large they may be.
        checkpoint: that records.
        tenant: whose picture it is.
        inspection: of the picture.
        parameters: of an edit; with `strict` the noise levels are its own, otherwise, and without an edit, the
            configured number of them, or so many as fit.
    """
    levels = partial(sigma_grid, checkpoint.scheduler, image_tokens=inspection.tokens)
    strict = parameters is not None and parameters.reuse is Reuse.STRICT
    if parameters is not None and strict:
        steps = parameters.num_inference_steps or config.template_levels
        grid = levels(steps=steps, strength=parameters.strength or 1.0)
        keeping = _keeping(config, checkpoint.family, inspection.tokens, grid.steps, grid.steps)
    else:
        keeping = _keeping(config, checkpoint.family, inspection.tokens, config.template_levels)
        grid = levels(steps=keeping.levels, strength=1.0)
    recording = digest_of(
        RECORDER,
        config.template_form,
        config.template_bits,
        [round(sigma, 6) for sigma in grid.sigmas.tolist()],
        checkpoint.card.default_guidance_scale or 0.0,
        keeping.first_block,
    )
    name = f"{picture_id(tenant, inspection.template_key)}-{recording}"
    return Wanted(name, grid, SAME if strict else ANYWHERE, keeping.first_block)


def _keeping(
    config: DenoiserConfig, family: Family, tokens: int, levels: int, least_levels: int = LEAST_LEVELS
) -> Keeping:
    """What fits into the configured bytes and into a tier: what none holds would be recorded at every edit."""
    bits = config.template_bits or 8 * family.dtype.itemsize
    parts = 2 if config.template_form is Form.KV else 1
    ranges = 0 if config.template_bits == EXACT else 2 * 4 * family.width
    tiers = [config.template_memory_mb]
    if config.template_folder is not None:
        tiers.append(config.template_disk_mb)
    budget_mb = max(tiers)
    if config.template_budget_mb is not None:
        budget_mb = min(budget_mb, config.template_budget_mb)
    return within(
        budget_mb << 20,
        levels=levels,
        blocks=family.blocks,
        block_bytes=parts * (tokens * family.width * bits // 8 + ranges + FILE_BYTES),
        least_levels=least_levels,
    )
