"""What `reuse` says changes no picture: a row has what full computation has, bit by bit, but for a template's noise."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from giornata import tensors
from giornata.blobs.store import MemoryBlobs
from giornata.families import Family
from giornata.packed.compute_set import region_of
from giornata.planning.cost_model import StepCosts
from giornata.wire.adapters import ControlUse
from giornata.wire.jobs import BlobRef, Encoding, Inspection, Job, Priority, RowRecord
from giornata.wire.messages import RunRequest
from giornata.wire.models import Sampler
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.resolution import cfg_scale, resolve
from giornata_denoiser.attempts.inputs import rows_of
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.rows.row import RecordingSpec
from giornata_denoiser.rows.template import CachedTemplate
from giornata_denoiser.templates.runs import TemplateReuse
from giornata_prepost.encoding import EncodingInputs, JobConditioning, encode_job, template_row
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.stages import ControlFiles, InspectedEdit, PixelLimits, inspect
from tests.fakes.fleet import REF
from tests.integration.painting import Served, ended, served
from tests.integration.prepost.asking import png

SIZE = Size(128, 128)
LIMITS = PixelLimits(1 << 20, 1 << 20)
SEED, PICTURES = 7, 2
COMPUTING_COSTS = StepCosts((0.1, 0.0, 1.0, 0.0, 0.0, 0.0))
"""Computing costs, loading nothing: what can be taken is."""
FREE = {
    Family.FLUX2,
    Family.FLUX2_KLEIN,
    Family.FLUX2_KLEIN_KV,
    Family.FLUX_KONTEXT,
    Family.QWEN_IMAGE_EDIT_PLUS,
    Family.QWEN_IMAGE_21,
}
"""Families whose pipelines draw nothing of the picture's posterior."""


def scene() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(1).integers(0, 256, (SIZE.height, SIZE.width, 3), np.uint8)


def marked() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """On no grid, and small enough that a cell of the largest ones is left."""
    mask = np.zeros((SIZE.height, SIZE.width), np.uint8)
    mask[3:39, 9:50] = 255
    return mask


ALIKE = {Family.FLUX2, Family.QWEN_IMAGE_EDIT, Family.SD_INPAINT, Family.SDXL}
"""Families whose pictures another one here prepares by the same code."""


@pytest.fixture(scope="module", params=sorted(set(Family) - ALIKE), ids=str)
def both(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[Family], Path]) -> Served:
    return served(tiny_checkpoint(request.param))


class Bench:
    """One edit of a family, prepared with each value of `reuse`."""

    def __init__(self, of: Served, **fields: Any) -> None:
        self.of, self.fields = (
            of,
            {"n": PICTURES, "num_inference_steps": 3, "halo": 0, "mask_blur": 0} | fields,
        )
        self.uses: tuple[ControlUse, ...] = ()

    def job(self, reuse: Reuse) -> Job:
        card = self.of.card
        parameters = resolve(EditParameters(prompt="a red hat", reuse=reuse, **self.fields), card, SEED)
        return Job(
            job_id="edit",
            tenant="t",
            gateway="g",
            priority=Priority.BATCH,
            model=card.name,
            model_digest=card.digest,
            parameters=parameters,
            image=REF,
            controls=self.uses,
            cfg_scale=cfg_scale(parameters, card),
            budget_ms=1000,
            result_ttl_s=60,
        )

    def inspected(self, job: Job) -> InspectedEdit:
        controls = ControlFiles([png(scene()) for _ in self.uses], self.uses)
        return inspect(png(scene()), png(marked()), job.parameters, self.of.card, LIMITS, (), controls)

    def encoded(self, reuse: Reuse) -> tuple[Job, Inspection, JobConditioning]:
        job = self.job(reuse)
        found = self.inspected(job)
        inputs = EncodingInputs(found.prepared, controls=found.controls)
        return job, found.measures, encode_job(self.of.images, job, inputs, SIZE)


def computed(inspection: Inspection) -> Tensor:
    """Indices of the tokens of the compute set."""
    assert inspection.compute_set is not None
    region = region_of(inspection.compute_set[1])
    assert region is not None
    return region.computed


def test_rows_are_those_of_full_computation(both: Served) -> None:
    card = both.card
    drawing = {"sampler": Sampler.EULER_ANCESTRAL} if Sampler.EULER_ANCESTRAL in card.samplers else {}
    variants: list[dict[str, Any]] = [{"strength": 1.0} | drawing, {"strength": 0.6}]
    for fields in variants:
        bench = Bench(both, **fields)
        _, _, full = bench.encoded(Reuse.OFF)
        _, _, reusing = bench.encoded(Reuse.AUTO)
        template = tensors.unpack(template_row(both.images, bench.inspected(bench.job(Reuse.AUTO)).prepared))
        assert len(full.rows) == PICTURES
        assert full.rows == reusing.rows
        first, second = (tensors.unpack(row) for row in reusing.rows)
        assert not torch.equal(first["noise"], second["noise"])
        moved = not torch.equal(first["image_latents"], template["image_latents"])
        assert moved == (card.family not in FREE | _blind(Family(card.family), fields))


def _blind(family: Family, fields: dict[str, Any]) -> set[Family]:
    """Families whose pipelines do not encode the picture at full strength."""
    nine = {Family.SD_INPAINT, Family.SDXL_INPAINT}
    return set() if fields.get("strength") == 0.6 and family in nine else nine


async def test_off_hit_and_miss_begin_with_the_same_latent_where_they_paint(both: Served) -> None:
    bench, blobs = Bench(both), MemoryBlobs()
    latents: dict[str, list[Tensor]] = {}
    recording = None
    for name, reuse, how in (
        ("off", Reuse.OFF, None),
        ("not reusing", Reuse.AUTO, None),
        ("miss", Reuse.AUTO, TemplateReuse(1.0, None, COMPUTING_COSTS, renew_steps=7)),
        ("hit", Reuse.AUTO, TemplateReuse(1.0, None, COMPUTING_COSTS)),
    ):
        job, inspection, made = bench.encoded(reuse)
        encoding = Encoding(
            text=await kept(blobs, tensors.pack(made.text)),
            text_tokens=both.images.text_tokens(made.text),
            rows=tuple([await kept(blobs, row) for row in made.rows]),
        )
        records = tuple(RowRecord(index=index, seed=SEED + index) for index in range(PICTURES))
        request = RunRequest(
            job=job, attempt=1, inspection=inspection, encoding=encoding, rows=records, remaining_ms=1000
        )
        taking = replace(how, recording=recording) if how and name == "hit" else how
        rows = await rows_of(request, both.checkpoint, blobs, taking)
        if name == "not reusing":
            recorded = replace(rows[0], records=RecordingSpec(frozenset({CacheForm.KV}), 0))
            recording = CachedTemplate("t", rows[0].grid, ended(both.checkpoint, [recorded])["edit"].entries)
        assert all((row.template is not None) == (name == "hit") for row in rows)
        latents[name] = [row.latent for row in rows]
        for row in rows:
            assert set(row.conditioning) >= {"noise"}
            latents[name] += [each for _, each in sorted(row.conditioning.items())]
    for name, found in latents.items():
        where = computed(inspection) if name == "hit" else slice(None)  # outside it has the recorded noise
        assert all(
            torch.equal(each[where], own[where]) for each, own in zip(found, latents["off"], strict=True)
        ), name


async def kept(blobs: MemoryBlobs, data: bytes) -> BlobRef:
    return await blobs.put(secrets.token_hex(8), data, 60)
