"""Which rows may begin with each other's latents: those of one key.

A key is exact. All that a latent depends on is in it, but for the prompt and the seed: prompts are compared within a
key, and the seed of what is begun so decides nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from giornata.wire.jobs import BlobRef, Inspection, Job
from giornata.wire.models import Task
from giornata.wire.requests import Approximate, Reuse
from giornata.wire.samplers import Sampler
from giornata.wire.step_caches import SETTINGS, StepCache


def key_of(job: Job, inspection: Inspection) -> str | None:
    """The key of a job's rows, hex; None where they neither take latents nor leave any.

    These are jobs that do not ask, jobs whose sampler remembers earlier steps, jobs whose LoRAs may join late, so that
    two of them differ in what their first steps were made with, and edits whose mask an older prepost did not tell.
    """
    asked = job.parameters
    if asked.approximate is Approximate.OFF or Sampler(asked.sampler or Sampler.EULER).remembers:
        return None
    if any(lora.joins_within for lora in job.loras):
        return None
    place = _place(job, inspection)
    if place is None:
        return None
    described = [*_made_by(job, inspection), *place]
    return hashlib.sha256(json.dumps(described, separators=(",", ":")).encode()).hexdigest()


def _made_by(job: Job, inspection: Inspection) -> Iterator[object]:
    """Who asks, and everything but prompt, seed and picture that the network sees, or its schedule follows.

    Levels are compared exactly: `steps`, `strength` and `sampler` are here, since a share of other steps ends at
    another level.
    """
    asked = job.parameters
    yield job.tenant
    yield job.model_digest
    yield sorted((lora.sha256, lora.scale) for lora in job.loras if lora.scale)
    for use in job.controls:
        image = None if use.image is None else _content(job.control_images[use.image])
        yield [use.digest, use.scale, use.start, use.end, use.mode, use.annotator, image]
    yield [_content(reference) for reference in job.references]
    yield [inspection.model_width, inspection.model_height]
    yield [asked.num_inference_steps, asked.sampler, asked.strength]
    if asked.step_cache is not StepCache.OFF:
        yield [asked.step_cache, *(getattr(asked, field) for field in SETTINGS)]
    yield [asked.guidance_scale, asked.true_cfg_scale, job.cfg_scale, asked.negative_prompt]


def _place(job: Job, inspection: Inspection) -> list[object] | None:
    """The picture and the mask of an edit, and which tokens it computes; none of what is made from noise alone.

    An edit whose mask covers all, at full strength, begins with noise as a generation does, unless the network sees the
    picture beside it. A control image of the edit's own picture tells of it, too.
    """
    if job.task is Task.GENERATE:
        return []
    own_control = any(use.image is None for use in job.controls)
    whole = inspection.mask_whole and job.parameters.strength == 1
    if whole and not inspection.companion_tokens and not own_control:
        return []
    if not inspection.mask_key:
        return None
    reuses = job.parameters.reuse is not Reuse.OFF
    cells = inspection.compute_set if reuses else None
    tokens = {str(grain): found.bits.hex() for grain, found in (cells or {}).items()}
    return [inspection.template_key, inspection.mask_key, reuses, tokens]


def _content(ref: BlobRef) -> str:
    return ref.blake3 or ref.sha256
