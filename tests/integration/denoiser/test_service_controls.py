"""Rows under ControlNets that a denoiser has loaded, asked for over NATS."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from giornata import tensors
from giornata.control.networks import ControlNet
from giornata.wire.adapters import ControlUse, control_name
from giornata.wire.jobs import JobState
from giornata.wire.messages import RunRequest
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.controls import sessions
from giornata_denoiser.controls.residuals import ControlNetTarget, control_target, open_controls
from tests.fakes.tiny_flux_control import beside
from tests.integration.denoiser.bench import WAIT_S, Bench
from tests.patience import HUNG_S

CPU = torch.device("cpu")


def fitting(checkpoint: Checkpoint, **options: Any) -> Any:
    """A random ControlNet for the checkpoint."""
    config = checkpoint.family.network.transformer.config  # type: ignore[attr-defined]  # of the tiny checkpoint
    return beside(config, **options)


def of(checkpoint: Checkpoint) -> ControlNetTarget | None:
    return control_target(checkpoint.family.network, checkpoint.card.pixel_multiple)


def loaded(bench: Bench, folder: Path) -> ControlNet:
    if not (folder / "edges").exists():
        fitting(bench.checkpoint).save_pretrained(folder / "edges")
    nets = open_controls(f"edges={folder / 'edges'}", of(bench.checkpoint), dtype=torch.float32, device=CPU)
    bench.checkpoint = replace(bench.checkpoint, controlnets=nets)
    (found,) = nets.values()
    return found


async def under(bench: Bench, request: RunRequest, *uses: ControlUse) -> RunRequest:
    """`request` with ControlNets, and a control image for each."""
    draw = torch.Generator().manual_seed(5)
    images = {control_name(nth): torch.randn(12, 64, generator=draw) for nth in range(len(uses))}
    ref = await bench.blobs.put(f"{request.job.job_id}/controls", tensors.pack(images), HUNG_S)
    return request.model_copy(
        update={
            "job": request.job.model_copy(update={"controls": uses}),
            "encoding": request.encoding.model_copy(update={"controls": (ref,)}),
        }
    )


async def test_a_picture_follows_its_control_image(bench: Bench, tmp_path: Path) -> None:
    made = loaded(bench, tmp_path)
    use = ControlUse(model="edges", digest=made.card.digest, scale=0.8)
    async with bench.worker() as worker:
        plain = await bench.computed(worker, await bench.job(worker))
        pictures = [
            await bench.computed(worker, await under(bench, await bench.job(worker), one))
            for one in (use, use, use.model_copy(update={"scale": 0.0}))
        ]
        async with asyncio.timeout(WAIT_S):
            while not (state := await bench.states.get()).controlnets:
                pass
    assert (pictures[0] - plain).abs().max() > 1e-2
    torch.testing.assert_close(pictures[0], pictures[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(pictures[2], plain, atol=1e-5, rtol=0)
    assert [(card.name, card.digest) for card in state.controlnets] == [("edges", made.card.digest)]
    (told,) = state.controlnets
    assert told.work == made.card.work
    assert told.work is not None


async def test_a_picture_is_never_made_without_a_controlnet_that_is_not_here(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "TOLD_S", 0.0)
    async with bench.worker() as worker:
        request = await under(bench, await bench.job(worker), ControlUse(model="edges", digest="e" * 64))
        await bench.run(worker, request)
        told = await bench.report()
        record = await bench.records.get(request.job.job_id)
    assert record.state is JobState.RUNNING, "the router ends it"
    (row,) = record.rows
    error = row.error or told.error  # type: ignore[attr-defined]  # either tells
    assert error is not None
    assert error.code == "controlnet_not_found"
