"""A generation equals the family's text-to-image pipeline: prepost's noise, the engine's steps, prepost's decoding."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image

from giornata.families import Family
from giornata.scheduling.batch import Capacity
from giornata.wire.errors import SchemaMismatch, TooManyPixels
from giornata.wire.requests import EditParameters
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.families.rows import build_row
from giornata_denoiser.rows.snapshot import Snapshot
from giornata_prepost.images import generation
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.stages import PixelLimits
from tests.integration.painting import Served, ended, of_edit, of_generation, served

LIMITS: Final = PixelLimits(1 << 20, 1 << 16)
STEPS: Final = 3


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Callable[[Family], Path]) -> Path:
    return tiny_checkpoint(Family.FLUX_INPAINT)


@pytest.fixture(scope="module")
def flux(folder: Path) -> Served:
    return served(folder)


def asked(flux: Served, **fields: Any) -> EditParameters:
    return of_generation(flux.card, prompt="a red hat", num_inference_steps=STEPS, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"size": "64x48", "seed": 7},
        {"size": "48x64", "seed": 8, "true_cfg_scale": 2.5, "negative_prompt": "blurry"},
    ],
    ids=["distilled", "true guidance"],
)
def test_a_generation_equals_fluxs_text_to_image_pipeline(
    folder: Path, flux: Served, fields: dict[str, Any]
) -> None:
    parameters = asked(flux, **fields)
    inspection = generation.measured(parameters, flux.card, LIMITS)
    size = Size(inspection.model_width, inspection.model_height)
    row = flux.generated("made", parameters, size)
    painted = flux.images.decode(ended(flux.checkpoint, [row])["made"].latent, size)
    file = Image.open(BytesIO(generation.finished(parameters, painted)))

    pipeline: Any = FluxPipeline.from_pretrained(folder, use_safetensors=True, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    guided = {name: value for name, value in fields.items() if name in {"true_cfg_scale", "negative_prompt"}}
    (theirs,) = pipeline(
        parameters.prompt,
        height=size.height,
        width=size.width,
        num_inference_steps=STEPS,
        guidance_scale=3.5,
        max_sequence_length=flux.card.max_text_tokens,
        generator=torch.Generator().manual_seed(fields["seed"]),
        **guided,
    ).images
    assert file.size == theirs.size == size
    difference = np.abs(np.asarray(file, np.int16) - np.asarray(theirs, np.int16))
    assert difference.max() <= 1
    assert np.asarray(theirs).std() > 5  # the comparison can fail


def test_a_generation_in_a_batch_with_others_is_the_same_as_alone(flux: Served) -> None:
    wanted = flux.generated("wanted", asked(flux, seed=7), Size(64, 48))
    other = flux.generated("other", asked(flux, seed=9), Size(48, 80))
    pixels = np.random.default_rng(3).integers(0, 256, (48, 64, 3), np.uint8)
    mask = np.zeros((48, 64), np.uint8)
    mask[10:30, 12:40] = 255
    scarf = of_edit(flux.card, prompt="a scarf", num_inference_steps=STEPS + 1, strength=1.0, seed=11)
    edit = flux.edited("edit", scarf, pixels, mask)
    together = ended(flux.checkpoint, [edit, wanted, other])
    assert together.keys() == {"edit", "wanted", "other"}
    for row in (edit, wanted, other):
        key = row.key.job_id
        alone = ended(flux.checkpoint, [row])[key]
        torch.testing.assert_close(together[key].latent, alone.latent, atol=1e-4, rtol=0)


def test_a_generation_resumes_where_it_was_interrupted(flux: Served) -> None:
    row = flux.generated("made", asked(flux, seed=7), Size(64, 48))
    whole = ended(flux.checkpoint, [row])["made"].latent
    ticks = count()
    engine = Engine(flux.checkpoint.family, Capacity(rows=1, tokens=1), lambda: float(next(ticks)))
    engine.batch.submit([row])
    report = engine.step()
    assert report is not None
    snapshot: Snapshot = report.advanced[0].export()
    resumed = build_row(
        flux.checkpoint.family,
        row.key,
        grid=row.grid,
        track=row.track,
        text=flux.images.encode_text("a red hat", Size(64, 48)),
        conditioning=row.conditioning,
        guidance_scale=3.5,
        resume=snapshot,
        generated=True,
    )
    assert resumed.step == 1
    again = ended(flux.checkpoint, [resumed])["made"].latent
    torch.testing.assert_close(again, whole, atol=1e-5, rtol=0)


def test_an_edit_without_its_picture_is_no_generation(flux: Served) -> None:
    row = flux.generated("made", asked(flux, seed=7), Size(64, 48))
    with pytest.raises(SchemaMismatch, match="image_latents"):
        build_row(
            flux.checkpoint.family,
            row.key,
            grid=row.grid,
            track=row.track,
            text=flux.images.encode_text("a red hat", Size(64, 48)),
            conditioning=row.conditioning,
            guidance_scale=3.5,
        )


def test_auto_is_the_native_square_and_limits_hold(flux: Served) -> None:
    native = generation.measured(asked(flux), flux.card, LIMITS)
    assert (native.model_width, native.model_height) == (flux.card.native_size,) * 2
    assert native.tokens == native.compute_tokens == (flux.card.native_size // 16) ** 2
    assert native.prepared is None
    small = generation.measured(asked(flux), flux.card, PixelLimits(1 << 20, 100 * 100))
    assert (small.output_width, small.output_height) == (96, 96)
    with pytest.raises(TooManyPixels) as refused:
        generation.measured(asked(flux, size="1024x1024"), flux.card, LIMITS)
    assert (refused.value.field, refused.value.accepted) == ("size", f"at most {1 << 16} pixels")
