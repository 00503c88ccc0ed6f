"""The memory of steps in the shapes of published checkpoints, beside what the engine reckons for them.

On a device that is not there, whose tensors have shapes and no values. What a token's activations take is measured as a
profile does, of one and of two rows of 1024²; the engine's reckoning is held against eight rows, and against 2048².
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Final

import pytest
import torch

from giornata.packed.uses import Taken, Use
from giornata.wire.values import Mode
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.engine.assembly import assemble, place
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.engine.stepping import denoise_step
from giornata_denoiser.engine.weighing import Budget, step_bytes
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.profiling.making import activation_bytes
from giornata_denoiser.profiling.measuring import Meter
from giornata_denoiser.profiling.mixtures import Mixture, RowSize
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.stored import Stored, bits_of
from giornata_denoiser.rows.template import Entry, Kept, Recording
from tests.bench.compute import families
from tests.bench.compute.models import REAL, flux
from tests.bench.compute.rows import Rows
from tests.bench.systems.workload import Edit
from tests.fakes.cuda import CUDA, World, pretended
from tests.unit.denoiser.engine.test_rehearsal import CARD

BITS: Final = 4
TIER_BYTES: Final = 14 << 30
SIZES: Final = tuple(product((1024, 2048), (1, 8)))
"""Sides of pictures in pixels, and rows."""


@dataclass(frozen=True)
class Published:
    text_tokens: int
    token_pixels: int = 16
    in_full: tuple[tuple[int, int], ...] = SIZES
    """Sizes at which steps in full are held against the reckoning; masked ones are at all."""


FAMILIES: Final = {"sdxl": Published(77, 32, in_full=((2048, 8),)), "flux": Published(512)}


def family_of(name: str) -> ModelFamily:
    if name == "flux":
        return flux(REAL, torch.bfloat16, CUDA)
    return families.family(name, published=True, dtype=torch.bfloat16, device=CUDA)


def entry_of(family: ModelFamily, tokens: int, world: World) -> Entry:
    """A template's entry in pinned memory; blocks share its tensors, whose values nobody reads."""

    @lru_cache(None)
    def tensors(channels: int, bits: int) -> tuple[torch.Tensor, ...]:
        if bits == 0:
            return (world.pin(torch.zeros(tokens, channels, dtype=torch.float32)),)
        levels = torch.zeros(tokens, channels * bits // 8, dtype=torch.uint8)
        return tuple(world.pin(each) for each in (levels, torch.zeros(channels), torch.zeros(channels)))

    def kept(parts: dict[str, int]) -> Kept:
        return Kept(
            **{
                name: Stored(*tensors(channels, bits_of(name, BITS)))
                for name, channels in parts.items()
                if name != "hidden"
            }
        )

    return Entry(0.5, tuple(kept(dict(spec.parts)) for spec in family.specs))


class Steps:
    """Steps of a family's rows, all of one kind."""

    def __init__(self, name: str, family: ModelFamily, world: World) -> None:
        self.family, self._world, self._of = family, world, FAMILIES[name]

    def rows(self, pixels: int, count: int, *, masked: bool) -> list[Row]:
        rows = Rows(self.family, pixels // self._of.token_pixels, self._of.text_tokens)
        edits = [Edit(each, 0, 0.11, (each + 0.5) / count, 0.5, 4) for each in range(count)]
        made = [rows.masked(edit) if masked else rows.row(edit, reuse=False) for edit in edits]
        if not masked:
            return made
        entry = entry_of(self.family, rows.tokens + made[0].companions, self._world)
        taken = Recording("t", made[0].grid, (entry,))
        return [replace(row, template=taken, begun=True, step=1) for row in made]

    def peak_bytes(self, rows: Sequence[Row]) -> int:
        """Most memory of the second of two steps, beyond the model's weights."""
        gc.collect()
        before = self._world.live_bytes
        with torch.inference_mode():
            on_device = [
                replace(row, latent=row.latent.pin_memory().to(CUDA, non_blocking=True)) for row in rows
            ]
            placed = [place(row, self.family) for row in on_device]
            assembly = assemble(self.family, on_device, placed)
            uses = self._uses(on_device)
            denoise_step(self.family, assembly, on_device, uses())
            gc.collect()
            self._world.clear()
            denoise_step(self.family, assembly, on_device, uses())
        return self._world.peak_bytes - before

    def _uses(self, rows: Sequence[Row]) -> Callable[[], Sequence[Use]]:
        device = device_for(CUDA, TIER_BYTES)
        taken = [
            Taken(entry.modes, Slabs(entry, row.region, row.own_tokens[0], self.family, device=device))
            for row in rows
            if row.template is not None and row.region is not None
            for entry in row.template.entries
        ]
        return lambda: [Use(taken=each) for each in taken]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_reckons_a_steps_memory_within_a_tenth(name: str) -> None:
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    reckoned = {}
    with pretended(values=False) as world:
        with torch.inference_mode():
            family = family_of(name)
        published = FAMILIES[name]
        card = CARD.model_copy(update={"max_text_tokens": published.text_tokens})
        meter = Meter(Checkpoint(card, family, None), BITS)
        side = 1024 // published.token_pixels
        text = published.text_tokens if meter.text_tokens else 0
        one = RowSize(side, side, text, (Mode.FULL,) * family.depth)
        budget = Budget(activation_bytes=activation_bytes(meter, [Mixture((one,)), Mixture((one, one))]))
        steps = Steps(name, family, world)
        cases = [*((*size, False) for size in published.in_full), *((*size, True) for size in SIZES)]
        for pixels, count, masked in cases:
            rows = steps.rows(pixels, count, masked=masked)
            wanted = steps.peak_bytes(rows)
            reckoned[pixels, count, masked] = step_bytes(rows, budget, family) / wanted
        assert world.races == []
    assert all(0.9 <= ratio <= 1.1 for ratio in reckoned.values()), reckoned
