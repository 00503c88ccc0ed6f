"""The yardstick's recipe in miniature: steps, a stop, a restart, an export that diffusers runs, a judgement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from diffusers import StableDiffusionInpaintPipeline

from giornata_lab.model.fill import autoencoder as untrained_autoencoder
from giornata_lab.model.train import __main__ as program
from giornata_lab.model.train import autoencoder, run, unet
from giornata_lab.model.train.run import CurriculumStage, StagePlan, load_state

SIDE = 64


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny network, and batches of two."""
    monkeypatch.setattr(unet, "WIDTHS", (8, 16, 16))
    monkeypatch.setattr(unet, "HEADS", 2)
    monkeypatch.setattr(unet, "NORM_GROUPS", 4)
    monkeypatch.setattr(run, "FIRST", {SIDE: 2})
    course = replace(unet.UNET, stages=(CurriculumStage(1.01, {SIDE: 1.0}),), rows={SIDE: 2})
    monkeypatch.setattr(unet, "UNET", course)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A training folder with an autoencoder of random weights and a narrow posterior."""
    vae = untrained_autoencoder(unet.LATENTS)
    with torch.no_grad():  # the pipeline samples the posterior, training takes its mode: here they are one
        vae.encoder.conv_out.bias[unet.LATENTS.channels :] = -30
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
    state = load_state(folder / "unet.pt")
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
    assert pipeline.tokenizer.model_max_length == unet.TEXT_TOKENS
