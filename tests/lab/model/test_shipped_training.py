"""The training recipe in miniature: every stage, a restart, an export that diffusers runs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxFillPipeline
from PIL import Image

from giornata.families import Family
from giornata.model_cards import read_model_card
from giornata_lab.model.fill import TEXT_TOKENS, shifted
from giornata_lab.model.scenes import SceneTask, sample, shapes
from giornata_lab.model.train import autoencoder, painter, run
from giornata_lab.model.train.__main__ import main
from giornata_lab.model.train.run import CurriculumStage, StagePlan, TrainingStateUnusable, load_state
from giornata_tools.checkout import TRAINED

pytestmark = pytest.mark.long


def ended(arguments: list[str]) -> object:
    """Exit status of the training program."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoencoder, "POOL", 8)
    monkeypatch.setattr(autoencoder, "MEASURED", 4)
    monkeypatch.setattr(run, "FIRST", dict.fromkeys(run.FIRST, 2))
    for name in ("PAINTER", "GUIDANCE"):
        course = replace(getattr(painter, name), stages=(CurriculumStage(1.01, {48: 1.0}),), rows={48: 2})
        monkeypatch.setattr(painter, name, course)
    monkeypatch.setattr(autoencoder, "BATCHES", ((48, 1), (48, 1), (64, 1)))


def plan(folder: Path, steps: int) -> StagePlan:
    return StagePlan(folder, steps, 0, torch.device("cpu"))


@pytest.mark.usefixtures("small")
def test_the_recipe_goes_on_where_it_stopped_and_ends_in_a_checkpoint(tmp_path: Path) -> None:
    autoencoder.run(plan(tmp_path, 2))
    first = vae_files(tmp_path)
    autoencoder.run(plan(tmp_path, 2))
    assert vae_files(tmp_path) == first, "what is done stays as it is: the painter learns on its latents"

    painter.run(plan(tmp_path, 2))
    _everything_is_restored(tmp_path)
    painter.run(plan(tmp_path, 3))
    assert painter.PainterRun(plan(tmp_path, 3)).step == 3

    painter.distil(plan(tmp_path, 1))
    before = autoencoder.load(tmp_path).state_dict()
    autoencoder.refine(plan(tmp_path, 1))
    after = autoencoder.load(tmp_path).state_dict()
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"decoder"}, "latents stay what the transformer was trained on"
    assert vae_files(tmp_path)["config.json"] == first["config.json"]

    assert ended(["export", "--folder", str(tmp_path), "--checkpoint", str(tmp_path / "checkpoint")]) == 0
    card = read_model_card(tmp_path / "checkpoint")
    assert card.family == Family.FLUX_FILL
    assert (card.native_size, card.default_steps, card.max_text_tokens) == (256, 20, TEXT_TOKENS)
    for side in (128, 256):
        _same_as_the_pipeline(tmp_path, side)

    painter.run(plan(tmp_path, 4))
    with pytest.raises(TrainingStateUnusable, match="learnt from another painter"):
        painter.distil(plan(tmp_path, 2))


def vae_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "vae").iterdir()}


def _everything_is_restored(folder: Path) -> None:
    """Weights, averages, both optimisers' moments and the count of scenes are those of the file."""
    state = load_state(folder / "painter.pt")
    assert state is not None
    run = painter.PainterRun(plan(folder, 3))
    assert run.step == state["step"] == 2
    assert any(p.any() for p in run.model.transformer.proj_out.parameters()), "it has learnt something"
    for module, saved in ((run.model, state["weights"]), (run.average, state["average"])):
        torch.testing.assert_close(module.state_dict(), saved, rtol=0, atol=0)
    moments = [optimiser.state_dict()["state"] for optimiser in run.optimisers]
    assert all(moments)
    torch.testing.assert_close(moments, [saved["state"] for saved in state["optimisers"]], rtol=0, atol=0)
    run.save()
    again = load_state(folder / "painter.pt")
    assert again is not None
    assert again["rendered"] == state["rendered"]
    assert sum(again["rendered"].values()) > 0


@pytest.mark.usefixtures("small")
def test_a_stage_without_what_it_builds_on_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ("--folder", str(tmp_path))
    assert ended(["export", *folder]) == 1
    assert "train first" in capsys.readouterr().err
    shutil.copytree(TRAINED / "vae", tmp_path / "vae")
    assert ended(["guidance", *folder, "--steps", "1"]) == 1
    assert "painter.pt is missing" in capsys.readouterr().err
    painter.PainterRun(plan(tmp_path, 2)).save()
    assert ended(["export", *folder]) == 1
    assert "stopped at step 0 of 2" in capsys.readouterr().err


def _same_as_the_pipeline(folder: Path, side: int) -> None:
    """What training samples with is what diffusers computes, for equal noise."""
    pipeline = FluxFillPipeline.from_pretrained(folder / "checkpoint", dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    with torch.no_grad():  # the pipeline samples the posterior, training takes its mode: here they are one
        pipeline.vae.encoder.conv_out.weight[8:] = 0
        pipeline.vae.encoder.conv_out.bias[8:] = -30
    scene = sample(np.random.default_rng(1), side, SceneTask.ADD, 24.0)
    run = painter.PainterRun(plan(folder, 1), painter.GUIDANCE)
    run.average.transformer.load_state_dict(pipeline.transformer.state_dict())
    run.average.clip.load_state_dict(pipeline.text_encoder.state_dict())
    run.average.t5.load_state_dict(pipeline.text_encoder_2.state_dict())
    batch = run.encoder.encode([replace(scene, after=scene.before)]).to(torch.device("cpu"))
    noise = torch.randn(1, (side // 8) ** 2, 32, generator=torch.Generator().manual_seed(5))
    read = run.average.read(*batch.token_ids)
    sigmas = [*shifted(torch.linspace(1, 1 / 3, 3), noise.shape[1]), torch.zeros(())]
    ours, guidance = noise, torch.tensor([30.0])
    with torch.no_grad():
        for now, then in pairwise(sigmas):
            velocity = run.average(ours, batch.condition, read, time=now[None], guidance=guidance)
            ours = ours + (then - now) * velocity
    theirs = pipeline(
        prompt=scene.caption,
        image=Image.fromarray(scene.before),
        mask_image=shapes.image(scene.mask),
        height=side,
        width=side,
        num_inference_steps=3,
        guidance_scale=30.0,
        max_sequence_length=TEXT_TOKENS,
        latents=noise,
        output_type="latent",
    ).images
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
