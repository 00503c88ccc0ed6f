"""The training recipe in miniature: every stage, a restart, an export that diffusers runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxFillPipeline
from PIL import Image

from deploy.model.architecture import TEXT_TOKENS
from deploy.model.painter import denoise
from deploy.model.scenes import Task, sample
from deploy.model.train import autoencoder, decoder, export, guidance, painter, pool
from deploy.model.train.plan import Plan
from giornata.models import Family, read_model_card


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoencoder, "POOL", 8)
    monkeypatch.setattr(autoencoder, "MEASURED", 4)
    monkeypatch.setattr(pool, "FIRST", dict.fromkeys(pool.FIRST, 2))
    monkeypatch.setattr(painter, "ROWS", dict.fromkeys(painter.ROWS, 2))
    monkeypatch.setattr(painter, "STAGES", (painter.Stage(1.01, {48: 1.0}),))
    monkeypatch.setattr(guidance, "GUIDANCE", painter.Course("guidance", (painter.Stage(1.01, {48: 1.0}),)))
    monkeypatch.setattr(painter, "PAINTER", painter.Course("painter", (painter.Stage(1.01, {48: 1.0}),)))
    monkeypatch.setattr(decoder, "BATCHES", ((48, 1), (48, 1), (64, 1)))


def plan(folder: Path, steps: int) -> Plan:
    return Plan(folder, steps, 0, torch.device("cpu"))


@pytest.mark.usefixtures("small")
def test_the_recipe_goes_on_where_it_stopped_and_ends_in_a_checkpoint(tmp_path: Path) -> None:
    autoencoder.run(plan(tmp_path, 2))
    encoder = (tmp_path / "vae" / "config.json").read_text()

    painter.run(plan(tmp_path, 2))
    stopped = painter.Run(plan(tmp_path, 3), painter.PAINTER)
    assert stopped.step == 2
    assert any(p.any() for p in stopped.painter.transformer.proj_out.parameters()), "it has learnt something"
    painter.run(plan(tmp_path, 3))
    assert painter.Run(plan(tmp_path, 3), painter.PAINTER).step == 3

    guidance.run(plan(tmp_path, 1))
    before = autoencoder.load(tmp_path).state_dict()
    decoder.run(plan(tmp_path, 1))
    after = autoencoder.load(tmp_path).state_dict()
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"decoder"}, "latents stay what the transformer was trained on"
    assert (tmp_path / "vae" / "config.json").read_text() == encoder

    export.run(tmp_path, tmp_path / "checkpoint")
    card = read_model_card(tmp_path / "checkpoint")
    assert card.family is Family.FLUX_FILL
    assert (card.native_size, card.default_steps, card.max_text_tokens) == (256, 20, TEXT_TOKENS)
    _same_as_the_pipeline(tmp_path)


def _same_as_the_pipeline(folder: Path) -> None:
    """What training samples with is what diffusers computes, for equal noise."""
    pipeline = FluxFillPipeline.from_pretrained(folder / "checkpoint", dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    with torch.no_grad():  # the pipeline samples the posterior, training takes its mode: here they are one
        pipeline.vae.encoder.conv_out.weight[8:] = 0
        pipeline.vae.encoder.conv_out.bias[8:] = -30
    scene = sample(np.random.default_rng(1), 128, Task.ADD, 24.0)
    run = painter.Run(plan(folder, 1), guidance.GUIDANCE)
    run.average.transformer.load_state_dict(pipeline.transformer.state_dict())
    run.average.clip.load_state_dict(pipeline.text_encoder.state_dict())
    run.average.t5.load_state_dict(pipeline.text_encoder_2.state_dict())
    batch = run.encoder.encode(
        torch.from_numpy(scene.before)[None], torch.from_numpy(scene.mask)[None], [scene.caption]
    ).to(torch.device("cpu"))
    noise = torch.randn(1, 256, 32, generator=torch.Generator().manual_seed(5))
    read = run.average.read(batch.clip_ids, batch.t5_ids)
    ours = denoise(run.average, batch.condition, read, noise, steps=3, guidance=30.0)
    theirs = pipeline(
        prompt=scene.caption,
        image=Image.fromarray(scene.before),
        mask_image=Image.fromarray(scene.mask.astype(np.uint8) * np.uint8(255)),
        height=128,
        width=128,
        num_inference_steps=3,
        guidance_scale=30.0,
        max_sequence_length=TEXT_TOKENS,
        latents=noise,
        output_type="latent",
    ).images
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
