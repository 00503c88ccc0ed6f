"""Rows that begin with another row's latent: as diffusers does with `latents` and `sigmas`, and as a service."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor

from giornata import tensors
from giornata.scheduling.batch import Capacity
from giornata.wire.jobs import BlobRef
from giornata.wire.messages import RunAnswer, RunRequest
from giornata.wire.progress import ApproximateUse, RowRecord, RowState
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.families.rows import Another
from giornata_denoiser.rows.keeping import Keeping
from giornata_denoiser.rows.row import Row
from tests.integration.denoiser.bench import Bench, Worker
from tests.integration.denoiser.oracle import (
    Edit,
    Model,
    Models,
    conditioning,
    diffusers_latent,
    picture_and_mask,
    row,
    text_inputs,
)

EDIT = Edit(width=48, height=80, steps=6, guidance_scale=30.0)
STEPS = range(1, EDIT.steps)


@pytest.fixture(autouse=True)
def _modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline draws the picture's posterior from the noise's generator, which `latents` leave at its beginning."""
    mode = DiagonalGaussianDistribution.mode
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: mode(self))


def run(model: Model, begun: Row) -> list[Row]:
    """The row after each of its steps."""
    ticks = count()
    engine = Engine(model.checkpoint.family, Capacity(rows=1, tokens=1), lambda: float(next(ticks)))
    engine.batch.submit([begun])
    found: list[Row] = []
    while (report := engine.step()) is not None:
        assert report.failed == ()
        found += report.advanced
    return found


def begun_at(model: Model, drawn: dict[str, Tensor], latent: Tensor, step: int, edit: Edit = EDIT) -> Row:
    return row(model, edit, drawn, another=Another(step, latent, None))


def from_sigmas(model: Model, edit: Edit, latent: Tensor, step: int) -> Tensor:
    """(tokens, 64): what `FluxFillPipeline` ends with that begins with `latent` after so many steps."""
    picture, mask = picture_and_mask(edit)
    given: dict[str, Any] = {name: one[None] for name, one in text_inputs(model.dtype).items()}
    result: Tensor = model.pipeline(
        **{name: one for name, one in given.items() if not name.startswith("negative_")},
        image=picture,
        mask_image=mask,
        height=edit.height,
        width=edit.width,
        num_inference_steps=edit.steps - step,
        sigmas=np.linspace(1.0, 1 / edit.steps, edit.steps)[step:].tolist(),
        latents=latent[None],
        guidance_scale=edit.guidance_scale,
        generator=torch.Generator().manual_seed(99),
        output_type="latent",
        max_sequence_length=48,
    ).images
    return result[0]


@pytest.mark.parametrize("step", STEPS)
def test_begun_with_its_own_latent_a_row_is_the_edit_and_diffusers(fill: Models, step: int) -> None:
    model = fill.single
    drawn = conditioning(model, EDIT)
    whole = run(model, row(model, EDIT, drawn))
    latent, last = whole[step - 1].latent, whole[-1].latent
    other = dict(drawn, noise=torch.randn_like(drawn["noise"]))  # another seed's
    mine = run(model, begun_at(model, other, latent, step))
    assert [each.step for each in mine] == list(range(step + 1, EDIT.steps + 1))
    torch.testing.assert_close(mine[-1].latent, last, atol=1e-5, rtol=0)
    torch.testing.assert_close(mine[-1].latent, from_sigmas(model, EDIT, latent, step), atol=1e-5, rtol=0)
    torch.testing.assert_close(mine[-1].latent, diffusers_latent(model, EDIT), atol=1e-5, rtol=0)
    assert (run(model, row(model, EDIT, other))[-1].latent - last).abs().max() > 0.1  # the seed would decide


@pytest.mark.parametrize("step", STEPS)
def test_so_is_one_of_a_family_that_blends(inpaint: Models, step: int) -> None:
    model = inpaint.single
    drawn = conditioning(model, EDIT)
    whole = run(model, row(model, EDIT, drawn))
    mine = run(model, begun_at(model, drawn, whole[step - 1].latent, step))
    torch.testing.assert_close(mine[-1].latent, whole[-1].latent, atol=1e-5, rtol=0)


def test_the_steps_that_are_asked_for_are_kept_in_16_bits(fill: Models) -> None:
    model = fill.single
    drawn = conditioning(model, EDIT)
    asked = replace(row(model, EDIT, drawn), keeping=Keeping(frozenset({2, 3}), None))
    whole = run(model, asked)
    kept = dict(whole[-1].kept)
    assert set(kept) == {2, 3}
    for step, latent in kept.items():
        assert latent.dtype == torch.float16
        torch.testing.assert_close(latent.float(), whole[step - 1].latent, atol=1e-3, rtol=1e-3)
        mine = run(model, begun_at(model, drawn, latent, step))[-1].latent
        torch.testing.assert_close(mine, whole[-1].latent, atol=1e-2, rtol=0)


PAINTED = (5, 6)
"""Painted tokens, of the twelve of the bench's picture."""


async def kept_of(bench: Bench, worker: Worker, request: RunRequest) -> RowRecord:
    assert await bench.run(worker, request) is RunAnswer.ACCEPTED
    await bench.report()
    (found,) = (await bench.records.get(request.job.job_id)).rows
    return found


def with_another(request: RunRequest, latents: BlobRef, step: int) -> RunRequest:
    (asked,) = request.rows
    begun = asked.model_copy(
        update={
            "resume": RowState(step=step, latents=latents, another=True),
            "approximate": ApproximateUse(step=step, cosine=0.97, entry="e"),
        }
    )
    return request.model_copy(update={"rows": (begun,)})


async def written(bench: Bench, request: RunRequest) -> RunRequest:
    """The request's rows, as its job's record has them, too."""
    await bench.records.change(
        request.job.job_id, lambda record: record.model_copy(update={"rows": request.rows})
    )
    return request


@pytest.mark.parametrize(("reuse", "tokens"), [("auto", len(PAINTED)), ("off", 12)])
async def test_a_row_leaves_the_tokens_it_paints_and_another_goes_on_there(
    bench: Bench, reuse: str, tokens: int
) -> None:
    async with bench.worker() as worker:
        asked: dict[str, Any] = {"painted": PAINTED, "reuse": reuse, "halo": 0, "steps": 4}
        request = await bench.job(worker, **asked)
        left = await kept_of(bench, worker, request.model_copy(update={"keep_after": (1, 2)}))
        assert [each.step for each in left.kept] == [1, 2]
        for each in left.kept:
            latent = tensors.unpack(await bench.blobs.get(each.latents))["latents"]
            assert (latent.shape[0], latent.dtype) == (tokens, torch.float16)
        while not bench.steps.empty():
            bench.steps.get_nowait()
        again = with_another(await bench.job(worker, **asked), left.kept[1].latents, 2)
        found = await kept_of(bench, worker, await written(bench, again))
        assert [(await bench.step()).step for _ in range(2)] == [3, 4]
        assert found.approximate == ApproximateUse(step=2, cosine=0.97, entry="e")
        assert (found.resume, found.kept, found.error) == (None, (), None)
        assert await bench.blobs.has(left.kept[1].latents), "another row's latent is not the job's to delete"


async def test_a_latent_that_has_gone_means_to_begin_with_the_rows_own_noise(bench: Bench) -> None:
    async with bench.worker() as worker:
        gone = BlobRef(key="prompts/gone", size_bytes=1, sha256="ab")
        request = await bench.job(worker, painted=PAINTED, reuse="auto", halo=0, steps=4)
        found = await kept_of(bench, worker, await written(bench, with_another(request, gone, 2)))
        assert [(await bench.step()).step for _ in range(4)] == [1, 2, 3, 4]
        assert (found.approximate, found.error) == (None, None)


async def test_a_latent_of_other_tokens_fails_its_row(bench: Bench) -> None:
    async with bench.worker() as worker:
        data = tensors.pack({"latents": torch.zeros(3, 64, dtype=torch.float16)})
        other = await bench.blobs.put("prompts/other", data, 60)
        request = await bench.job(worker, painted=PAINTED, reuse="auto", halo=0, steps=4)
        found = await kept_of(bench, worker, await written(bench, with_another(request, other, 2)))
        assert found.error is not None
        assert found.error.code == "schema_mismatch"
