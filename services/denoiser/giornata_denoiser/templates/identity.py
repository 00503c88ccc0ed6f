"""The name of a recording, and its place in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Final, NamedTuple

import torch

from giornata.planning.operations import (
    LEAST_LEVELS,
    TemplateRunScope,
    is_all_or_nothing,
    largest_scope_within,
)
from giornata.wire.jobs import Inspection, picture_id
from giornata.wire.models import MOMENTS, PARTS, BlockSpec, Sampler
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.values import BlockMode, digest_of
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.choices import BITS, EXACT, CacheForm, WeightQuantization
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import RecordingSpec, SamplerTable
from giornata_denoiser.rows.template import FILE_BYTES, CachedTemplate, Correction, bits_of, stored_bytes


class HostMemory(NamedTuple):
    """Puts what is kept where it is to lie. May copy, and so take long; safe in several threads."""

    recording: Callable[[CachedTemplate], CachedTemplate]
    correction: Callable[[Correction], Correction]


ORDINARY: Final = HostMemory(lambda recording: recording, lambda correction: correction)
"""As it comes: mapped from a file, or as a step has left it."""
PINNED: Final = HostMemory(methodcaller("pinned"), methodcaller("pinned"))
"""Pinned memory, from which a CUDA device reads asynchronously."""


RECORDER: Final = 3
"""Version of what template runs record; nothing is taken from recordings of another version."""
ANYWHERE: Final = 1.0
SAME: Final = 1e-4
"""Tolerances of noise levels."""
LEVELS: Final = 6
LEVELS_TOGETHER: Final = 12
"""Recorded noise levels where none are configured: of transformers, and of networks whose blocks are taken together.
Decision record 0013 has the measurements."""
NEAR_TOGETHER: Final = frozenset(
    {
        Sampler.DDIM,
        Sampler.EULER,
        Sampler.DPMPP_2M,
        Sampler.DPMPP_2M_KARRAS,
        Sampler.UNIPC,
        Sampler.HEUN,
    }
)
"""Samplers that keep the pictures of networks whose blocks are taken together, by the same measurements."""


@dataclass(frozen=True)
class TemplateRunSpec:
    """A recording that is taken from, or made."""

    recording_id: str
    """The id of the picture, a dash, and a digest of how it is recorded."""
    track: SamplerTable
    """Noise levels of its run."""
    tolerance: float
    form: CacheForm
    bits: int
    """See :mod:`giornata_denoiser.rows.template`."""
    first_block: int
    """Blocks before it keep nothing, for want of bytes."""
    fits: bool
    """Whether any block is kept."""
    first: RecordingSpec
    """What an edit that finds no recording leaves for later ones."""


def wanted_recording(
    config: DenoiserConfig,
    checkpoint: Checkpoint,
    tenant: str,
    inspection: Inspection,
    parameters: EditParameters | None = None,
) -> TemplateRunSpec:
    """The recording of a picture, which is its tenant's own.

    Its noise levels are the configured number of levels, or as many as fit; for an edit with `strict`, they are the
    edit's own.

    Raises:
        InvalidField: the edit has no step to compute.
    """
    schedule, form = checkpoint.family.schedule, form_of(config, checkpoint.family)
    levels = partial(schedule.track, cells=inspection.tokens)
    multiple = checkpoint.card.pixel_multiple
    grid = inspection.model_height // multiple, inspection.model_width // multiple
    tokens = inspection.tokens + checkpoint.family.network.companions(grid, inspection.reference_grids)
    strict = parameters is not None and parameters.reuse is Reuse.STRICT
    if parameters is not None and strict:
        steps = parameters.num_inference_steps or levels_of(config, checkpoint.family)
        sampler = parameters.sampler or schedule.default_sampler
        track = levels(sampler=sampler, steps=steps, strength=parameters.strength or 1.0)
        kept, bits = storage_budget(config, checkpoint.family, tokens, track.steps, track.steps)
    else:
        kept, bits = storage_budget(config, checkpoint.family, tokens, levels_of(config, checkpoint.family))
        track = levels(sampler=schedule.recorder, steps=kept.levels, strength=1.0)
    levels_kept = [round(level, 6) for level in track.levels.tolist()]
    guidance = checkpoint.card.embedded_guidance_scale
    numerics = () if config.quantize is WeightQuantization.OFF else (config.quantize,)
    what = (form, bits, levels_kept, guidance, kept.first_block, *numerics)
    picture = picture_id(tenant, inspection.template_key)
    left = digest_of(RECORDER, "first", form, bits, kept.first_block, *numerics)
    return TemplateRunSpec(
        f"{picture}-{digest_of(RECORDER, *what)}",
        track,
        SAME if strict else ANYWHERE,
        form,
        bits,
        kept.first_block,
        fits=kept.first_block < checkpoint.family.depth,
        first=RecordingSpec(frozenset({form}), bits, kept.first_block, f"{picture}-{left}"),
    )


def picture_of(recording_id: str) -> str:
    """The id of the picture of a recording."""
    return recording_id.partition("-")[0]


def levels_of(config: DenoiserConfig, family: ModelFamily) -> int:
    """Noise levels of a template run, as far as they fit: the configured number, or the family's own."""
    own = LEVELS_TOGETHER if is_all_or_nothing(family.specs) else LEVELS
    return own if config.template_levels is None else config.template_levels


def takes_from_recordings(parameters: EditParameters, family: ModelFamily) -> bool:
    """Return whether an edit takes from recordings; with `auto` only by a sampler that is known to keep the picture."""
    if parameters.reuse is Reuse.OFF:
        return False
    sampler = parameters.sampler or family.schedule.default_sampler
    return parameters.reuse is Reuse.STRICT or not is_all_or_nothing(family.specs) or sampler in NEAR_TOGETHER


def form_of(config: DenoiserConfig, family: ModelFamily) -> CacheForm:
    """The configured form; keys and values where blocks have no use for their inputs."""
    configured = config.template_form
    return (
        configured if any(spec.channels([BlockMode(configured)]) for spec in family.specs) else CacheForm.KV
    )


def storage_budget(
    config: DenoiserConfig, family: ModelFamily, tokens: int, levels: int, least_levels: int = LEAST_LEVELS
) -> tuple[TemplateRunScope, int]:
    """Return what fits into the configured bytes and into a tier, and in which bits.

    `tokens` are those of the picture and its companions. What no tier holds would be recorded at every edit. Where
    blocks take together, none is left out: first the bits become fewer, then the levels.
    """
    disk_mb = 0 if config.template_folder is None else config.cache_disk_mb
    budget_mb = max(config.template_memory_mb, disk_mb)
    mode, whole = BlockMode(form_of(config, family)), is_all_or_nothing(family.specs)
    kept, bits = TemplateRunScope(0, family.depth), config.template_bits
    picture = -(-_picture_bytes(family, tokens) // family.depth)
    for bits in BITS[BITS.index(config.template_bits) :] if whole else (config.template_bits,):
        sizes = [
            picture + _block_bytes(spec, mode, bits, tokens, family.dtype.itemsize) for spec in family.specs
        ]
        kept = largest_scope_within(
            budget_mb << 20,
            levels=levels,
            blocks=1 if whole else family.depth,
            block_bytes=sum(sizes) if whole else max(sizes),
            least_levels=least_levels,
        )
        if kept == TemplateRunScope(levels, 0):
            break
    return (TemplateRunScope(kept.levels, kept.first_block * family.depth) if whole else kept), bits


def _picture_bytes(family: ModelFamily, tokens: int) -> int:
    """Bytes of the picture in a run's latent at one noise level, in a file; 0 where the network blends."""
    if family.network.blends:
        return 0
    channels = family.network.conditioning["image_latents"]
    return FILE_BYTES + stored_bytes(tokens, channels, EXACT, family.dtype.itemsize)


def _block_bytes(spec: BlockSpec, mode: BlockMode, bits: int, tokens: int, itemsize: int) -> int:
    """Bytes that a block keeps at one noise level, in a file."""
    return sum(
        FILE_BYTES
        + stored_bytes(
            tokens,
            spec.parts[part],
            bits_of(part, bits),
            torch.float32.itemsize if part == MOMENTS else itemsize,
        )
        for part in PARTS[mode]
        if part in spec.parts
    )
