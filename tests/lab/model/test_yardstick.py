"""The yardstick's recipe in miniature: steps, a stop, a restart, an export that diffusers runs, a judgement."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from diffusers import StableDiffusionInpaintPipeline
from PIL import Image

from giornata_lab.model.architecture import autoencoder as untrained_autoencoder
from giornata_lab.model.scenes import SceneTask, sample, shapes
from giornata_lab.model.train import __main__ as program
from giornata_lab.model.train import autoencoder, evaluate, pool, run, samples, stage, unet
from giornata_lab.model.train.run import CurriculumStage
from giornata_lab.model.train.stage import StagePlan
from giornata_lab.model.yardstick import architecture
from giornata_lab.model.yardstick.inpainter import denoise
from giornata_lab.quality import cases
from giornata_lab.quality.metrics import score

SIDE = 64


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny network, batches of two and no grids of samples."""
    monkeypatch.setattr(architecture, "WIDTHS", (8, 16, 16))
    monkeypatch.setattr(architecture, "HEADS", 2)
    monkeypatch.setattr(architecture, "NORM_GROUPS", 4)
    monkeypatch.setattr(pool, "FIRST", {SIDE: 2})
    course = replace(unet.UNET, stages=(CurriculumStage(1.01, {SIDE: 1.0}),), rows={SIDE: 2})
    monkeypatch.setattr(unet, "UNET", course)
    monkeypatch.setattr(samples, "COLUMNS", 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A training folder with an autoencoder of random weights and a narrow posterior."""
    vae = untrained_autoencoder(architecture.LATENTS)
    with torch.no_grad():  # the pipeline samples the posterior, training takes its mode: here they are one
        vae.encoder.conv_out.bias[architecture.LATENTS.channels :] = -30
    vae.register_to_config(scaling_factor=2.0)
    autoencoder.write(vae, tmp_path)
    return tmp_path


def plan(folder: Path, steps: int) -> StagePlan:
    return StagePlan(folder, steps, 0, torch.device("cpu"))


def program_says(*arguments: str | Path, status: int = 0) -> str:
    ended = CliRunner().invoke(program.main, ["--model", "yardstick", *map(str, arguments)])
    assert ended.exit_code == status, ended.output
    return ended.output


@pytest.mark.long
def test_a_stopped_run_goes_on_and_ends_in_a_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = iter([False, False, True])
    with monkeypatch.context() as clock:
        clock.setattr(StagePlan, "over", lambda _: next(over))
        unet.run(plan(folder, 3))
    state = stage.load(folder / "unet.pt")
    assert state is not None
    assert (state["step"], state["steps"]) == (2, 3)
    restored = unet.UNetRun(plan(folder, 3), unet.UNET)
    for module, saved in ((restored.model, state["weights"]), (restored.average, state["average"])):
        torch.testing.assert_close(module.state_dict(), saved, rtol=0, atol=0)
    for optimiser, saved in zip(restored.optimisers, state["optimisers"], strict=True):
        assert optimiser.state_dict()["state"]
        torch.testing.assert_close(optimiser.state_dict()["state"], saved["state"], rtol=0, atol=0)
    assert sum(state["rendered"].values()) > 0

    assert "stopped at step 2 of 3" in program_says("export", "--folder", folder, status=1)
    program_says("unet", "--folder", folder, "--steps", "3", "--threads", "1")
    program_says("export", "--folder", folder, "--checkpoint", folder / "checkpoint")
    assert json.loads((folder / "checkpoint" / "serving.json").read_text()) == {
        "steps": unet.STEPS,
        "guidance_scale": unet.GUIDANCE,
    }
    pipeline = StableDiffusionInpaintPipeline.from_pretrained(folder / "checkpoint", dtype=torch.float32)
    assert (pipeline.unet.config.in_channels, pipeline.vae.config.latent_channels) == (9, 4)
    assert pipeline.tokenizer.model_max_length == architecture.TEXT_TOKENS
    learning_on = unet.UNetRun(
        replace(plan(folder, 1), start=folder / "checkpoint"), replace(unet.UNET, title="on")
    )
    torch.testing.assert_close(
        learning_on.model.unet.state_dict(), pipeline.unet.state_dict(), rtol=0, atol=0
    )


@pytest.mark.long
def test_a_killed_run_has_its_last_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SAVE_EVERY_S", -1.0)
    trained = unet.UNetRun(plan(folder, 9), unet.UNET)

    def killed(batch: pool.SceneBatch) -> torch.Tensor:
        if trained.step == 2:
            raise KeyboardInterrupt
        return unet.noise_loss(trained.model, architecture.scheduler(), batch)

    with pytest.raises(KeyboardInterrupt):
        trained.train(killed, trained.show)
    assert unet.UNetRun(plan(folder, 9), unet.UNET).step == 2


def test_samples_are_what_the_pipeline_paints(folder: Path) -> None:
    torch.manual_seed(3)
    trained = unet.UNetRun(plan(folder, 1), unet.UNET)
    for parameter in trained.average.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))  # what begins as zero must count, too
    trained.save()
    pipeline = evaluate.opened(folder)
    scene = sample(np.random.default_rng(1), SIDE, SceneTask.ADD, 24.0)
    batch = trained.encoder.encode([replace(scene, after=scene.before)]).to(torch.device("cpu"))
    noise = torch.randn(batch.clean.shape, generator=torch.Generator().manual_seed(5))
    (ids,) = batch.token_ids
    text = trained.average.read(ids), trained.average.read(*trained.encoder.tokenize([""]))
    ours = denoise(trained.average, batch.condition, text, noise, steps=3, guidance=2.5)
    theirs = pipeline(
        prompt=scene.caption,
        image=Image.fromarray(scene.before),
        mask_image=shapes.image(scene.mask),
        height=SIDE,
        width=SIDE,
        num_inference_steps=3,
        guidance_scale=2.5,
        latents=noise,
        output_type="latent",
    ).images
    # what batches keep is rounded to bfloat16, the pipeline's conditioning is not
    assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.long
def test_the_loss_falls_on_few_scenes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "WARM_UP", 1)
    trained = unet.UNetRun(plan(folder, 40), unet.UNET)
    scheduler = architecture.scheduler()
    batch = trained.draw()

    def loss() -> torch.Tensor:
        torch.manual_seed(7)
        return unet.noise_loss(trained.model, scheduler, batch)

    first = float(loss().detach())
    for _ in range(10):
        trained.update(loss())
    assert float(loss().detach()) < 0.8 * first


def test_a_judgement_of_the_truth_is_a_hundred_percent(folder: Path) -> None:
    slots = evaluate.chosen(SceneTask.ADD, SIDE, 6) + evaluate.chosen(SceneTask.REMOVE, SIDE, 0)
    drawn = [cases.draw(slot) for slot in slots]
    assert "6 additions: 100.0% right" in evaluate.told([score(case, case.scene.after) for case in drawn])
    assert "6 additions: 0.0% right" in evaluate.told([score(case, case.scene.before) for case in drawn])

    unet.UNetRun(plan(folder, 2), unet.UNET).save()
    judged = CliRunner().invoke(
        evaluate.main, [str(folder), "--additions", "1", "--removals", "1", "--steps", "1"]
    )
    assert judged.exit_code == 0, judged.output
    assert "step 0 of 2" in judged.output
    assert "1 additions: 0.0% right" in judged.output
    assert "1 removals: PSNR" in judged.output


def test_an_empty_folder_cannot_be_judged(tmp_path: Path) -> None:
    judged = CliRunner().invoke(evaluate.main, [str(tmp_path)])
    assert judged.exit_code == 1
    assert "unet.pt is not in it" in judged.output


def test_a_plan_is_over_after_its_deadline(tmp_path: Path) -> None:
    assert not plan(tmp_path, 1).over()
    assert replace(plan(tmp_path, 1), deadline=0.0).over()


def test_a_stage_of_another_model_is_refused(tmp_path: Path) -> None:
    said = program_says("painter", "--folder", tmp_path, status=2)
    assert "it has: all, autoencoder, unet, decoder, export" in said
    assert "--minutes goes with one stage" in program_says("all", "--minutes", "1", status=2)


def test_latents_of_stable_diffusion_are_scaled_about_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoencoder, "POOL", 8)
    monkeypatch.setattr(autoencoder, "MEASURED", 4)
    autoencoder.run(replace(plan(tmp_path, 2), deadline=0.0), architecture.LATENTS)
    assert [path.name for path in tmp_path.iterdir()] == ["autoencoder.pt"], "stopped, not measured"
    autoencoder.run(plan(tmp_path, 2), architecture.LATENTS)
    vae = autoencoder.load(tmp_path)
    assert (vae.config.latent_channels, vae.config.shift_factor) == (4, 0.0)
    assert math.isfinite(vae.config.scaling_factor)
