"""Previews: after which steps, how many bytes, and from which latent."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from itertools import count, pairwise

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from giornata.scheduling.batch import Capacity
from giornata.wire.messages import PREVIEW_BYTES, PREVIEW_JOB_BYTES
from giornata_denoiser.attempts.attempt import encode, limit_bytes
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.families.preview_map import PreviewMap
from giornata_denoiser.rows.row import preview_steps
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.contract.messages import JOB, PARAMETERS
from tests.present import present
from tests.unit.denoiser.engine.test_masked import OF

GENERATOR = torch.Generator().manual_seed(0)
SEEN = PreviewMap(torch.randn(16, 3, generator=GENERATOR) / 8, torch.full((3,), 0.5))


@given(st.integers(1, 200), st.integers(0, 16))
def test_previews_are_evenly_spread_and_never_after_the_last_step(steps: int, asked: int) -> None:
    shown = preview_steps(steps, asked)
    assert len(shown) == min(asked, steps - 1)
    gaps = [after - before for before, after in pairwise((0, *shown, steps))]
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1


def test_where_previews_fall() -> None:
    assert preview_steps(28, 3) == (7, 14, 21)
    assert preview_steps(4, 16) == (1, 2, 3)
    assert preview_steps(50, 0) == preview_steps(1, 3) == ()


@given(
    st.integers(1, 200), st.integers(1, 200), st.sampled_from([700, 3276, PREVIEW_BYTES]), st.integers(0, 9)
)
def test_a_preview_keeps_to_its_limit_whatever_it_shows(
    width: int, height: int, limit: int, seed: int
) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    data, size = encode(noise, limit)
    assert len(data) <= limit
    with Image.open(BytesIO(data)) as picture:
        assert (picture.format, picture.size) == ("JPEG", size)
        assert picture.size[0] <= width
        assert abs(picture.size[0] * height - picture.size[1] * width) <= max(width, height) * 128


def test_what_fits_is_not_made_worse() -> None:
    ramp = np.linspace(0, 255, 128).astype(np.uint8)
    picture = np.dstack(
        [np.tile(ramp, (128, 1)), np.tile(ramp[:, None], (1, 128)), np.full((128, 128), 90, np.uint8)]
    )
    with Image.open(BytesIO(encode(picture, PREVIEW_BYTES)[0])) as read:
        assert np.abs(np.asarray(read).astype(int) - picture).mean() < 2


@given(st.integers(1, 10), st.integers(0, 16))
def test_all_previews_of_a_job_keep_to_its_share_of_the_stream(n: int, asked: int) -> None:
    job = JOB.model_copy(
        update={"parameters": PARAMETERS.model_copy(update={"n": n, "partial_images": asked})}
    )
    assert 700 <= limit_bytes(job) <= PREVIEW_BYTES
    assert n * asked * limit_bytes(job) <= PREVIEW_JOB_BYTES


def engine(of: ModelFamily) -> Engine:
    ticks = count()
    return Engine(of, Capacity(rows=8, tokens=10_000), lambda: float(next(ticks)), SEEN)


def run(made: Engine) -> list[StepReport]:
    reports = []
    while (report := made.step()) is not None:
        reports.append(report)
    return reports


def test_only_rows_that_ask_are_shown_and_when_they_asked() -> None:
    made = engine(OF)
    made.batch.submit(
        [
            tiny_flux.row(OF, Spec("quiet", steps=6)),
            tiny_flux.row(OF, Spec("shown", steps=6, partial_images=2)),
            tiny_flux.row(OF, Spec("short", steps=2, partial_images=9, grid=(2, 5))),
        ]
    )
    shown = [
        (number, preview.key.job_id, preview.step, preview.steps, preview.index, preview.pixels.shape)
        for number, report in enumerate(run(made), 1)
        for preview in report.previews
    ]
    assert shown == [
        (1, "short", 1, 2, 0, (4, 10, 3)),
        (2, "shown", 2, 6, 0, (6, 8, 3)),
        (4, "shown", 4, 6, 1, (6, 8, 3)),
    ]


def test_previews_do_not_change_what_is_computed() -> None:
    of = tiny_flux.family(fill=True)
    ends = []
    for asked in (0, 3):
        made = engine(of)
        made.batch.submit([tiny_flux.row(of, Spec(partial_images=asked))])
        ends.append(run(made)[-1].advanced[0].latent)
    assert torch.equal(*ends)


@pytest.mark.parametrize("fill", [False, True])
def test_a_preview_is_what_one_step_to_the_end_would_give(fill: bool) -> None:
    # x - sigma * v is the end of a single Euler step from x: a row whose grid has only that step computes it.
    of = tiny_flux.family(fill=fill)
    spec = Spec(steps=4, partial_images=3, grid=(3, 4))
    made = engine(of)
    row = tiny_flux.row(of, spec)
    made.batch.submit([row])
    first = present(made.step())
    (preview,) = first.previews
    ends, (of_latent, of_output) = [0, -1], row.track.clean[0]
    jump = replace(
        row.track,
        times=row.track.times[:1],
        levels=row.track.levels[ends],
        matrices=torch.tensor([[[0.0, of_output, of_latent]]]),
        outside=row.track.outside[ends],
    )
    leap = engine(of)
    leap.batch.submit([replace(row, track=jump)])
    (end,) = run(leap)
    latent = end.advanced[0].latent
    unpacked = FluxPipeline._unpack_latents(latent[None], 48, 64, 8)[0]
    colours = torch.einsum("chw,cr->hwr", unpacked, SEEN.weight) + SEEN.bias
    np.testing.assert_allclose(preview.pixels, (colours * 255).clamp(0, 255).numpy(), atol=0.51 + 1e-2)
    assert preview.pixels.std() > 20  # otherwise the comparison would prove nothing


def test_a_row_that_is_cancelled_while_its_step_runs_is_neither_reported_nor_shown() -> None:
    made = engine(OF)
    made.batch.submit([tiny_flux.row(OF, Spec(name, partial_images=3)) for name in ("a", "b")])
    report = made.computing.compute(made.plan())
    made.batch.cancel("a")
    settled = made.settle(report)
    assert [row.key.job_id for row in settled.advanced] == ["b"]
    assert [preview.key.job_id for preview in settled.previews] == ["b"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_previews_on_a_gpu_are_those_of_the_cpu() -> None:
    pictures = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        of = tiny_flux.family(FluxInpaint(tiny_flux.transformer().to(device)))
        made = Engine(of, Capacity(rows=8, tokens=10_000), lambda: 0.0, SEEN.to(device))
        made.batch.submit([tiny_flux.row(of, Spec(partial_images=1))])
        pictures += [preview.pixels.astype(int) for report in run(made) for preview in report.previews]
    on_cpu, on_gpu = pictures
    assert np.abs(on_cpu - on_gpu).max() <= 1
