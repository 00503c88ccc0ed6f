"""Engines on a device, edits for them, and copy streams that lag behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from giornata.packed.packing import Region, make_region
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.engine.loading import Accelerator, device_for
from giornata_denoiser.engine.slabs import Device, TransferHandle
from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.unit.denoiser.engine import edits

GRID: Final = (12, 12)
LAG_CYCLES: Final = 2_000_000
"""About a millisecond of a GPU: longer than a block of the tiny model computes."""
FLOAT32: Final = 2e-4
"""Rounding in float32, where two devices add in another order; what a wrong key makes is above 1e-3."""


def family(device: torch.device, dtype: torch.dtype = torch.float32) -> ModelFamily:
    """The tiny model on `device`, with the same weights everywhere."""
    model: Any = tiny_flux.transformer()
    return tiny_flux.family(FluxInpaint(model.to(device, dtype)))


def template(of: ModelFamily, forms: frozenset[CacheForm], steps: int, bits: int = 8) -> CachedTemplate:
    """A run over a picture of `GRID`; its entries are where the family's device wants them."""
    row = replace(tiny_flux.row(of, Spec("run", grid=GRID, steps=steps)), records=RecordingSpec(forms, bits))
    (done,) = finished(of, [row]).values()
    return CachedTemplate("t", GRID, done.entries)


def edit(of: ModelFamily, taken: CachedTemplate | None, spec: Spec, ratio: float = 0.1) -> Row:
    """A masked row; masks of two seeds are two places."""
    return changed(
        tiny_flux.row(of, replace(spec, grid=GRID)), region=_where(spec.seed, ratio), template=taken
    )


def finished(
    of: ModelFamily, rows: Sequence[Row], device: Device | None = None, **how: Any
) -> dict[str, Row]:
    """`rows` when they are done."""
    engine = edits.engine(of, device=device or device_for(of.device, 1 << 30), **how)
    engine.batch.submit(rows)
    return edits.finished(engine)


def latents(rows: dict[str, Row]) -> dict[str, Tensor]:
    """On the CPU, in float32."""
    return {name: row.latent.float().cpu() for name, row in rows.items()}


def _where(seed: int, ratio: float) -> Region:
    height, width = GRID
    chosen = torch.randperm(height * width, generator=torch.Generator().manual_seed(seed))
    touched = torch.zeros(height * width, dtype=torch.bool)
    touched[chosen[: max(1, int(ratio * height * width))]] = True
    found = make_region(touched.view(GRID))
    if found is None:
        raise ValueError("the mask leaves nothing outside")
    return found


class Lagging(Accelerator):
    """Every load takes a while on the copy stream: whoever reads too early reads something else."""

    @contextmanager
    def loading(self) -> Iterator[TransferHandle]:
        """The wait comes before what is loaded."""
        with super().loading() as arrival:
            torch.cuda._sleep(LAG_CYCLES)  # type: ignore[no-untyped-call]  # torch's is not typed
            yield arrival


def lagging(device: torch.device, budget_bytes: int = 1 << 30) -> Device:
    """A copy stream that lags; on the CPU, where nothing moves, what an engine has there."""
    return Lagging(device, budget_bytes) if device.type == "cuda" else device_for(device, budget_bytes)
