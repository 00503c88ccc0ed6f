"""Prepost's endpoints: real NATS, real Redis protocol, a real (tiny) checkpoint of each family."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from giornata import tensors
from giornata.blobs import RedisBlobs
from giornata.bus.bus import Bus
from giornata.families import Family
from giornata.wire.errors import (
    Failed,
    ImageUnreadable,
    InputLost,
    IntermediateLost,
    MaskEmpty,
    RowPoisoned,
    ServiceUnavailable,
    SizeMismatch,
    UnsupportedImageFormat,
)
from giornata.wire.models import ModelCard, Sampler
from giornata.wire.workers import HostDevice, ServiceState
from giornata_prepost.checkpoint import open_model
from giornata_prepost.config import PrepostConfig
from tests.integration.prepost.asking import (
    MASK,
    SCENE,
    a_job,
    configured,
    encoded,
    finished,
    inspected,
    own_name,
    png,
    serving,
    template_inputs,
)
from tests.patience import HUNG_S
from tests.present import present

pytestmark = pytest.mark.asyncio(loop_scope="module")
"""The instance of prepost is a module's."""
FAMILY = Family.FLUX_INPAINT
both = pytest.mark.parametrize("family", [FAMILY, Family.FLUX_FILL], indirect=True, ids=str)


@pytest.fixture
def own(tiny_checkpoint: Callable[[Family], Path], nats_url: str, redis_url: str) -> PrepostConfig:
    """An instance of a test alone, whose model has a name of its own."""
    return configured(tiny_checkpoint(FAMILY), nats_url, redis_url, model_name=own_name())


@both
async def test_a_template_is_what_its_edits_are_without_their_mask(
    caller: Bus, blobs: RedisBlobs, card: ModelCard
) -> None:
    made = await template_inputs(caller, blobs, card, png(SCENE))
    job = await a_job(blobs, card, png(SCENE), png(MASK), reuse="auto")
    inspection = await inspected(caller, job)
    encoding = await encoded(caller, job, inspection)
    assert made.inspection.template_key == inspection.template_key
    assert (made.inspection.tokens, made.inspection.compute_tokens) == (inspection.tokens, 0)
    assert made.empty_text == encoding.empty_text
    own = tensors.unpack(await blobs.get(made.conditioning))
    edits = tensors.unpack(await blobs.get(encoding.rows[0]))
    assert own["image_latents"].shape == edits["image_latents"].shape
    assert not torch.equal(own["image_latents"], edits["image_latents"]), (
        "an edit's are drawn, as by diffusers"
    )
    assert own["mask"].count_nonzero() == 0


async def test_rows_have_their_generators_state_where_their_sampler_draws(
    caller: Bus, blobs: RedisBlobs, card: ModelCard
) -> None:
    every = card.model_copy(update={"samplers": tuple(Sampler)})
    states = {}
    for sampler in (Sampler.EULER, Sampler.EULER_ANCESTRAL):
        job = await a_job(blobs, every, png(SCENE), png(MASK), n=2, seed=3, sampler=sampler)
        encoding = await encoded(caller, job, await inspected(caller, job))
        rows = [tensors.unpack(await blobs.get(row)) for row in encoding.rows]
        states[sampler] = [row["generator"] for row in rows if "generator" in row]
    assert states[Sampler.EULER] == []
    first, second = states[Sampler.EULER_ANCESTRAL]
    assert first.shape == torch.Generator().get_state().shape
    assert not torch.equal(first, torch.Generator().manual_seed(3).get_state()), "after its draws"
    assert not torch.equal(first, second)


async def test_what_cannot_be_a_template_is_refused(caller: Bus, blobs: RedisBlobs, card: ModelCard) -> None:
    with pytest.raises(UnsupportedImageFormat):
        await template_inputs(caller, blobs, card, b"no picture")
    with pytest.raises(SizeMismatch):
        await template_inputs(caller, blobs, card, png(SCENE), size="64x512")
    with pytest.raises(ServiceUnavailable, match="another version"):
        await template_inputs(caller, blobs, card, png(SCENE), model_digest="other")


@both
async def test_one_edit(caller: Bus, blobs: RedisBlobs, card: ModelCard) -> None:
    """Everything but the denoiser: what was encoded is decoded and pasted."""
    job = await a_job(blobs, card, png(SCENE), png(MASK), n=2, mask_blur=1.0)
    inspection = await inspected(caller, job)
    assert (inspection.model_width, inspection.model_height) == (96, 64)
    assert inspection.tokens == 24
    assert 0 < inspection.compute_tokens < inspection.tokens

    encoding = await encoded(caller, job, inspection)
    text = tensors.unpack(await blobs.get(encoding.text))
    rows = [tensors.unpack(await blobs.get(row)) for row in encoding.rows]
    assert encoding.text_tokens == text["prompt_embeds"].shape[0] == card.max_text_tokens
    assert encoding.padding_tokens == int((text[tensors.PROMPT_MASK] == 0).sum()) > 0
    assert len(rows) == 2
    assert rows[0]["noise"].shape == (24, 64)
    assert not torch.equal(rows[0]["noise"], rows[1]["noise"])

    latents = await blobs.put(
        f"{job.job_id}/final", tensors.pack({"latents": rows[0]["image_latents"]}), HUNG_S
    )
    reply = await finished(caller, job, inspection, latents)
    assert reply.decode_ms > 0
    assert reply.paste_ms > 0
    output = np.asarray(Image.open(BytesIO(await blobs.get(reply.image))))
    far = np.ones_like(MASK, np.bool_)
    far[15:45, 25:65] = False
    np.testing.assert_array_equal(output[far], SCENE[far])
    assert (output[20:40, 30:60] != SCENE[20:40, 30:60]).any()

    other = await inspected(caller, await a_job(blobs, card, png(SCENE), png(255 - MASK)))
    moved = await finished(caller, job, inspection.model_copy(update={"alpha": other.alpha}), latents)
    assert await blobs.get(moved.image) != await blobs.get(reply.image), (
        "the inspection's alpha is what is used"
    )


async def test_errors_keep_their_class(caller: Bus, blobs: RedisBlobs, card: ModelCard) -> None:
    with pytest.raises(ImageUnreadable) as unreadable:
        await inspected(caller, await a_job(blobs, card, png(SCENE)[:500], None))
    assert unreadable.value.field == "image"
    with pytest.raises(MaskEmpty):
        await inspected(caller, await a_job(blobs, card, png(SCENE), png(np.zeros_like(MASK))))
    job = await a_job(blobs, card, png(SCENE), None)
    await blobs.delete(present(job.image))
    with pytest.raises(InputLost):
        await inspected(caller, job)


async def test_a_lost_intermediate_is_named(caller: Bus, blobs: RedisBlobs, card: ModelCard) -> None:
    job = await a_job(blobs, card, png(SCENE), None)
    inspection = await inspected(caller, job)
    latents = await blobs.put("latents", tensors.pack({"latents": torch.zeros(24, 64)}), HUNG_S)
    assert inspection.alpha is not None
    await blobs.delete(inspection.alpha)
    with pytest.raises(IntermediateLost) as lost:
        await finished(caller, job, inspection, latents)
    assert (lost.value.field, lost.value.received) == ("alpha", inspection.alpha.key)
    await blobs.delete(latents)
    with pytest.raises(IntermediateLost) as lost:
        await finished(caller, job, inspection, latents)
    assert lost.value.field == "latents"
    await blobs.delete(present(inspection.prepared))
    with pytest.raises(IntermediateLost) as lost:
        await encoded(caller, job, inspection)
    assert lost.value.field == "prepared"


async def test_another_version_of_the_model_is_refused(
    caller: Bus, blobs: RedisBlobs, card: ModelCard
) -> None:
    job = (await a_job(blobs, card, png(SCENE), None)).model_copy(update={"model_digest": "other"})
    with pytest.raises(ServiceUnavailable) as caught:
        await inspected(caller, job)
    assert caught.value.retryable


async def test_a_blob_without_the_rows_latents(caller: Bus, blobs: RedisBlobs, card: ModelCard) -> None:
    job = await a_job(blobs, card, png(SCENE), None)
    inspection = await inspected(caller, job)
    for wrong in ({"other": torch.zeros(24, 64)}, {"latents": torch.zeros(23, 64)}):
        with pytest.raises(InputLost):
            await finished(caller, job, inspection, await blobs.put("wrong", tensors.pack(wrong), HUNG_S))


async def test_a_stage_repeated_does_not_replace_the_first_ones_blobs(
    caller: Bus, blobs: RedisBlobs, card: ModelCard
) -> None:
    job = await a_job(blobs, card, png(SCENE), None)
    first, second = [(await inspected(caller, job)).prepared for _ in range(2)]
    assert first is not None
    assert second is not None
    assert first.key != second.key
    assert first.sha256 == second.sha256
    assert await blobs.get(first) == await blobs.get(second)


async def test_a_folder_that_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="not part of a diffusers checkpoint"):
        open_model(PrepostConfig(model=str(tmp_path)))


async def test_a_model_is_rehearsed_before_it_serves(
    own: PrepostConfig, caller: Bus, blobs: RedisBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(own)
    with monkeypatch.context() as patched:
        patched.setattr(model, "decode", refuse)
        with pytest.raises(ExceptionGroup) as caught:
            async with serving(own, caller, blobs, model):
                raise AssertionError("it said that it is ready")
    assert caught.group_contains(Failed, match="cannot decode a picture")


async def test_telemetry_tells_the_gpu_that_was_claimed(
    own: PrepostConfig, caller: Bus, blobs: RedisBlobs
) -> None:
    gpus, states = (HostDevice(device="cuda:3", id="GPU-3a"),), list[ServiceState]()
    async with serving(own, caller, blobs, open_model(own), gpus, states.append):
        assert states[0].gpus == gpus


@pytest.mark.parametrize("drain_s", [0.0, 240.0])
async def test_draining_takes_its_time_and_no_more(
    drain_s: float, own: PrepostConfig, caller: Bus, blobs: RedisBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = own.model_copy(update={"drain_s": drain_s})
    model = open_model(config)
    card = model.card
    begun, gate = asyncio.Event(), threading.Event()
    loop, encode_text = asyncio.get_running_loop(), model.encode_text

    def held(prompt: str, *seen: Any) -> Any:
        if prompt:
            loop.call_soon_threadsafe(begun.set)
            assert gate.wait(HUNG_S)
        return encode_text(prompt, *seen)

    monkeypatch.setattr(model, "encode_text", held)
    async with serving(config, caller, blobs, model) as stop, asyncio.timeout(HUNG_S):
        job = await a_job(blobs, card, png(SCENE), None)
        asked = asyncio.ensure_future(encoded(caller, job, await inspected(caller, job)))
        await begun.wait()
        stop.set()
        if drain_s:
            gate.set()
            assert (await asked).text_tokens == card.max_text_tokens
        else:
            with pytest.raises(ServiceUnavailable, match="shutting down"):
                await asked
            gate.set()


def refuse(*args: object) -> None:
    raise RowPoisoned
