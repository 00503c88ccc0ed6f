"""The rehearsal on a device that is not there: what it leaves to edits, and what it says of too little memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from giornata.packed.low_rank import SequenceLoras
from giornata.scheduling.batch import Capacity, RowKey
from giornata.wire.errors import Failed
from giornata_denoiser.blocks.waits import WaitTimer
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.controls.added import RowResiduals
from giornata_denoiser.controls.networks import controlled
from giornata_denoiser.engine.controls import NoControls, OfSequences
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.engine.rehearsal import practice_row, rehearse
from giornata_denoiser.engine.sources import ReuseOptions
from giornata_denoiser.profiling.loras import RandomLoras
from giornata_denoiser.rows.adapters import Adapters, RowControl, RowLora
from giornata_denoiser.rows.row import Row
from giornata_denoiser.tuning import memory_on
from tests.fakes.cuda import CUDA, World, pretended
from tests.unit.denoiser.device.test_step_budgets import family
from tests.unit.denoiser.engine.test_rehearsal import CARD

GUIDED = CARD.model_copy(update={"takes_true_cfg": True})
GRID = (8, 8)


class Acting(NoControls):
    """A LoRA of every linear layer, and what a ControlNet adds behind every block; both are on the device already."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        of, self.loras = checkpoint.family, RandomLoras(checkpoint.family.network.layers)
        network = controlled(of.network, checkpoint.card.pixel_multiple)
        channels = () if network is None else network.base.channels
        sums = tuple(torch.zeros(1, 64, each, dtype=of.dtype, device=CUDA) for each in channels)
        self.added = RowResiduals(tuple(range(len(sums))), sums)
        self.find(())
        net = RowControl("n", "n", 1.0, 0, 2)
        self.adapters = Adapters((RowLora("a"),), controls=(net,) if channels else ())

    def find(self, loras: tuple[RowLora, ...]) -> SequenceLoras | None:
        return self.loras.set_of(1)

    def residuals(
        self, rows: Sequence[Row], whole: Sequence[bool], waits: WaitTimer
    ) -> tuple[OfSequences, ...]:
        return tuple(self.added.of(len(row.prompts)) if row.adapters.controls else () for row in rows)


def launched(world: World) -> set[str]:
    return {name for name, count in world.launches.items() if count}


@pytest.mark.parametrize("name", ["flux", "sd3", "qwen-image", "z-image", "unet"])
def test_a_guided_edit_with_a_lora_and_a_controlnet_launches_what_was_rehearsed(name: str) -> None:
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    with pretended() as world:
        checkpoint = Checkpoint(GUIDED, family(name), None)
        rehearse(checkpoint)
        rehearsed, compiled = launched(world), set(world.variants)
        acting = Acting(checkpoint)
        key = RowKey("edit", 0, 0)
        row = practice_row(checkpoint, key, GRID, GUIDED.max_text_tokens, torch.zeros, guided=True)
        how = ReuseOptions(device=device_for(CUDA, 0))
        engine = Engine(
            checkpoint.family,
            Capacity(8, 10_000),
            lambda: 0.0,
            reusing=how,
            low_ranks=acting,
            controls=acting,
        )
        engine.batch.submit([replace(row, adapters=acting.adapters)])
        world.clear()
        while (report := engine.step()) is not None:
            assert not report.failed, report.failed[0].error.__cause__
    assert launched(world) - rehearsed == set()
    assert world.variants - compiled == set()


def test_a_network_is_rehearsed_without_hooks_of_loras_that_stay() -> None:
    """What no LoRA changes is called as it is: hooks would cost each layer of each step some of the host's time."""
    with pretended(triton=False):
        checkpoint = Checkpoint(CARD, family("flux"), None)
        rehearse(checkpoint)
        layers: Any = checkpoint.family.network.layers
        assert not any(layer._forward_hooks for layer in layers.values())


def test_a_step_that_does_not_fit_is_told_by_the_memory_and_not_by_a_dtype() -> None:
    with pretended(triton=False) as world:
        checkpoint = Checkpoint(CARD, family("flux"), None)
        free = 16 << 10
        world.limit_bytes = world.live_bytes + free
        with pytest.raises(Failed, match="memory holds m and no step;") as refused:
            rehearse(checkpoint)
        assert "dtype" not in str(refused.value)
        assert isinstance(refused.value.__cause__, torch.OutOfMemoryError)


def test_what_the_allocator_keeps_of_the_rehearsal_is_given_to_rows() -> None:
    config = DenoiserConfig(model="m", device="cuda")
    with pretended(triton=False) as world:
        checkpoint = Checkpoint(CARD, family("flux"), None)
        before = memory_on(config, checkpoint)
        passing = nn.Module.to(nn.Linear(1 << 10, 1 << 15), CUDA)
        del passing
        assert world.reserved_bytes > world.live_bytes
        assert memory_on(config, checkpoint) == before
