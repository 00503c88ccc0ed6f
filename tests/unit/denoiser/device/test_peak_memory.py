"""The memory of steps in the shapes of published checkpoints, beside what the engine reckons for them.

On a device that is not there, whose tensors have shapes and no values. What a token's activations take is measured as a
profile does, of one and of two rows of 1024²; the engine's reckoning is held against one row of them, and several of
2048².
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from giornata.packed.packing import BlockInputs, CachedTokens
from giornata.wire.values import BlockMode
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.engine.batch_tensors import assemble, place_inputs
from giornata_denoiser.engine.denoise_step import denoise_step
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.engine.slabs import Slabs
from giornata_denoiser.engine.step_budget import StepBudget, step_bytes
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.profiling.fitting import activation_bytes
from giornata_denoiser.profiling.measuring import StepMeter
from giornata_denoiser.profiling.mixtures import RowSize, StepShape
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import CachedBlock, CachedTemplate, Entry, StoredTensor, bits_of
from giornata_lab.bench.compute.models import REAL, family, flux
from giornata_lab.bench.compute.rows import Rows, changed
from giornata_lab.bench.compute.workload import WorkloadEdit
from tests.fakes.cuda import CUDA, World, pretended
from tests.fakes.fleet import CARD

BITS: Final = 4
TIER_BYTES: Final = 14 << 30
SIZES: Final = ((1024, 1), (2048, 8))
"""Sides of pictures in pixels, and rows."""
Off = Mapping[tuple[int, int, bool], float]
"""What is reckoned over what is needed, by pixels, rows and whether they are masked."""


@dataclass(frozen=True)
class Published:
    text_tokens: int
    depths: Sequence[Mapping[str, Any]] = ({},)
    """Changes of its configuration: few equal blocks, and some more; or none."""
    left: int = 0
    """How many times as many more as these the checkpoint has."""
    token_pixels: int = 16
    off: Off = field(default_factory=dict)
    """What is known to be more than a tenth off."""


def layers(text_tokens: int, least: int, off: Off | None = None, **of: tuple[int, int]) -> Published:
    """A transformer: kinds of layers, so many of each for one of the first kind, and in the checkpoint."""
    depths = [{name: many * each for name, (each, _) in of.items()} for many in (least, least + 1)]
    each, most = next(iter(of.values()))
    return Published(text_tokens, depths, most // each - least, off=off or {})


FAMILIES: Final = {
    "sdxl": Published(
        77, [{"transformer_layers_per_block": (1, 2, deep)} for deep in (2, 3)], left=8, token_pixels=32
    ),
    "sd": Published(77, token_pixels=64),
    "flux": layers(512, 2, num_layers=(1, 19), num_single_layers=(2, 38)),
    "flux2": layers(512, 2, num_layers=(1, 8), num_single_layers=(6, 48)),
    "chroma": layers(512, 2, num_layers=(1, 19), num_single_layers=(2, 38)),
    "sd3": layers(333, 4, num_layers=(1, 38)),
    "qwen-image": layers(512, 3, num_layers=(1, 60)),
    "z-image": layers(512, 3, {(2048, 8, True): 1.135}, n_layers=(1, 30)),
}


def family_of(name: str, changed: Mapping[str, Any]) -> ModelFamily:
    if name == "flux":
        return flux({**REAL, **changed}, torch.bfloat16, CUDA)
    return family(name, published=True, dtype=torch.bfloat16, device=CUDA, changed=changed)


def entry_of(family: ModelFamily, tokens: int, world: World) -> Entry:
    """A template's entry in pinned memory; blocks share its tensors, whose values nobody reads."""

    @lru_cache(None)
    def tensors(channels: int, bits: int) -> tuple[torch.Tensor, ...]:
        if bits == 0:
            return (world.pin(torch.zeros(tokens, channels, dtype=torch.float32)),)
        levels = torch.zeros(tokens, channels * bits // 8, dtype=torch.uint8)
        return tuple(world.pin(each) for each in (levels, torch.zeros(channels), torch.zeros(channels)))

    def kept(parts: dict[str, int]) -> CachedBlock:
        return CachedBlock(
            **{
                name: StoredTensor(*tensors(channels, bits_of(name, BITS)))
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
        edits = [WorkloadEdit(each, 0, 0.11, (each + 0.5) / count, 0.5, 4) for each in range(count)]
        made = [rows.masked(edit) if masked else rows.row(edit, reuse=False) for edit in edits]
        if not masked:
            return made
        entry = entry_of(self.family, rows.tokens + made[0].inputs.companions, self._world)
        taken = CachedTemplate("t", made[0].grid, (entry,))
        return [changed(row, template=taken, degree=1, step=1) for row in made]

    def peak_bytes(self, rows: Sequence[Row]) -> int:
        """Most memory of the second of two steps, beyond the model's weights."""
        gc.collect()
        before = self._world.live_bytes
        with torch.inference_mode():
            on_device = [
                replace(row, latent=row.latent.pin_memory().to(CUDA, non_blocking=True)) for row in rows
            ]
            placed = [place_inputs(row, self.family) for row in on_device]
            assembly = assemble(self.family, on_device, placed)
            uses = self._uses(on_device)
            denoise_step(self.family, assembly, on_device, uses())
            gc.collect()
            self._world.clear()
            denoise_step(self.family, assembly, on_device, uses())
        return self._world.peak_bytes - before

    def _uses(self, rows: Sequence[Row]) -> Callable[[], Sequence[BlockInputs]]:
        device = device_for(CUDA, TIER_BYTES)
        taken = [
            CachedTokens(entry.modes, Slabs(entry, row.region, row.own_tokens[0], self.family, device=device))
            for row in rows
            if row.reuse.template is not None and row.region is not None
            for entry in row.reuse.template.entries
        ]
        return lambda: [BlockInputs(taken=each) for each in taken]


def told(name: str, sizes: Sequence[tuple[int, int]], changed: Mapping[str, Any], world: World) -> Tensor:
    """Bytes that the engine reckons, and that steps need: of each size, in full and masked."""
    with torch.inference_mode():
        family = family_of(name, changed)
    published = FAMILIES[name]
    card = CARD.model_copy(update={"max_text_tokens": published.text_tokens})
    meter = StepMeter(Checkpoint(card, family, None), BITS)
    side = 1024 // published.token_pixels
    text = published.text_tokens if meter.text_tokens else 0
    one = RowSize(side, side, text, (BlockMode.FULL,) * family.depth).beside(meter.companions, meter.prefix)
    most, even = activation_bytes(meter, [StepShape((one,)), StepShape((one, one))])
    budget = StepBudget(activation_bytes=most, even_bytes=even)
    steps = Steps(name, family, world)
    found = []
    for (pixels, count), masked in product(sizes, (False, True)):
        rows = steps.rows(pixels, count, masked=masked)
        needed = steps.peak_bytes(rows)
        found.append((step_bytes(rows, budget, family), needed))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("flux", ((2048, 4),)),
        ("sd", SIZES[:1]),
        *(pytest.param(name, SIZES, marks=pytest.mark.long) for name in FAMILIES),
    ],
)
def test_the_engine_reckons_a_steps_memory_within_a_tenth(
    name: str, sizes: Sequence[tuple[int, int]]
) -> None:
    """Of as many equal blocks as the checkpoint has: each adds as many bytes as the ones that are measured."""
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    published = FAMILIES[name]
    with pretended(values=False, limit_bytes=1 << 40) as world:
        few, *some = (told(name, sizes, changed, world) for changed in published.depths)
        assert world.races == []
    more = sum((each - few for each in some), torch.zeros_like(few))
    reckoned, needed = (few + published.left * more).unbind(1)
    cases = [(*size, masked) for size, masked in product(sizes, (False, True))]
    ratios = dict(zip(cases, (reckoned / needed).tolist(), strict=True))
    assert {case: ratio for case, ratio in ratios.items() if not 0.9 <= ratio <= 1.1} == pytest.approx(
        published.off, abs=0.01
    )
