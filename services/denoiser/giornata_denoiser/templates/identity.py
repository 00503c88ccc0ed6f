"""What a recording is called: its picture, and a digest of all that the recording follows from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from giornata.planning.specs import LEAST_LEVELS, PARTS, Keeping, within
from giornata.wire.jobs import Inspection
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.templates import digest_of, picture_id
from giornata.wire.values import Mode
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Track
from giornata_denoiser.rows.stored import EXACT
from giornata_denoiser.rows.template import FILE_BYTES

RECORDER: Final = 1
"""Version of what template runs record; nothing is taken from recordings of another version."""
ANYWHERE: Final = 1.0
SAME: Final = 1e-4
"""Tolerances of noise levels."""


@dataclass(frozen=True)
class Wanted:
    """A recording that is taken from, or made."""

    recording_id: str
    """The id of the picture, a dash, and a digest of how it is recorded."""
    track: Track
    """Noise levels of its run."""
    tolerance: float
    first_block: int
    """Blocks before it keep nothing, for want of bytes."""
    fits: bool
    """Whether any block is kept."""


def wanted(
    config: DenoiserConfig,
    checkpoint: Checkpoint,
    tenant: str,
    inspection: Inspection,
    parameters: EditParameters | None = None,
) -> Wanted:
    """The recording of a picture, which is its tenant's own.

    Its noise levels are the configured number of levels, or as many as fit; for an edit with `strict`, they are the
    edit's own.

    Raises:
        InvalidField: the edit has no step to compute.
    """
    levels = partial(checkpoint.family.schedule.track, cells=inspection.tokens)
    multiple = checkpoint.card.pixel_multiple
    grid = inspection.model_height // multiple, inspection.model_width // multiple
    tokens = inspection.tokens + checkpoint.family.network.companions(grid)
    strict = parameters is not None and parameters.reuse is Reuse.STRICT
    if parameters is not None and strict:
        steps = parameters.num_inference_steps or config.template_levels
        track = levels(steps=steps, strength=parameters.strength or 1.0)
        kept = keeping(config, checkpoint.family, tokens, track.steps, track.steps)
    else:
        kept = keeping(config, checkpoint.family, tokens, config.template_levels)
        track = levels(steps=kept.levels, strength=1.0)
    levels_kept = [round(level, 6) for level in track.levels.tolist()]
    guidance = checkpoint.card.default_guidance_scale or 0.0
    what = (config.template_form, config.template_bits, levels_kept, guidance, kept.first_block)
    return Wanted(
        f"{picture_id(tenant, inspection.template_key)}-{digest_of(RECORDER, *what)}",
        track,
        SAME if strict else ANYWHERE,
        kept.first_block,
        fits=kept.first_block < checkpoint.family.depth,
    )


def picture_of(recording_id: str) -> str:
    """The id of the picture of a recording."""
    return recording_id.partition("-")[0]


def keeping(
    config: DenoiserConfig, family: ModelFamily, tokens: int, levels: int, least_levels: int = LEAST_LEVELS
) -> Keeping:
    """What fits into the configured bytes and into a tier; what no tier holds would be recorded at every edit.

    `tokens` are those of the picture and its companions.
    """
    bits = config.template_bits or 8 * family.dtype.itemsize
    mode = Mode(config.template_form)
    channels = max(spec.channels([mode]) for spec in family.specs)
    ranges = 0 if config.template_bits == EXACT else 2 * 4 * channels
    disk_mb = 0 if config.template_folder is None else config.template_disk_mb
    budget_mb = max(config.template_memory_mb, disk_mb)
    if config.template_budget_mb is not None:
        budget_mb = min(budget_mb, config.template_budget_mb)
    return within(
        budget_mb << 20,
        levels=levels,
        blocks=family.depth,
        block_bytes=tokens * channels * bits // 8 + ranges + len(PARTS[mode]) * FILE_BYTES,
        least_levels=least_levels,
    )
