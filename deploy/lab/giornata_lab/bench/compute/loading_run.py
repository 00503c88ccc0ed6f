"""All steps of one picture by given modes, over the throttled loader: the planner's plan as it is carried out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from giornata.packed.compute_set import BlockInputs, CachedTokens
from giornata.planning.block_plans import takes
from giornata.wire.values import BlockMode
from giornata_denoiser.blocks.slabs import Device, Slabs
from giornata_denoiser.engine.batch_tensors import assemble
from giornata_denoiser.engine.denoise_step import denoise_step
from giornata_denoiser.engine.loading import Loader, SlabRun, device_for
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import Entry
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.bench.reporting.report import wait_for


@dataclass(frozen=True, eq=False)
class LoadingScene:
    """One picture's row and what it may take, a step an entry."""

    rows: Rows
    row: Row
    entries: tuple[Entry, ...]

    @property
    def blocks(self) -> int:
        """Blocks of the transformer."""
        return self.rows.family.depth

    def slabs(self, entry: Entry) -> Slabs:
        """Nothing loaded yet."""
        region = self.row.region
        if region is None:
            raise SystemExit("the mask leaves nothing to be reused; ask for a smaller one")
        return Slabs(entry, region, self.row.own_tokens[0], self.rows.family, device=self._device)

    @cached_property
    def _device(self) -> Device:
        """Keeps nothing, so that every picture loads all that it takes."""
        return device_for(self.rows.family.device, 0)


def picture_ms(scene: LoadingScene, modes: Sequence[BlockMode], rate_bytes_s: float, *, ahead: bool) -> float:
    """Milliseconds of all steps of the picture.

    Args:
        scene: of what.
        modes: of all blocks of all steps.
        rate_bytes_s: of the loader.
        ahead: load while computing, up to the end of the next step; otherwise all of a step before it is computed.
    """
    family, row = scene.rows.family, scene.row
    steps = [tuple(modes[start : start + scene.blocks]) for start in range(0, len(modes), scene.blocks)]
    slabs = [scene.slabs(entry) for entry in scene.entries]
    assembly = assemble(family, [row])
    wait_for(family.device)
    with Loader(rate_bytes_s) as loader:
        began = time.perf_counter()
        for step, chosen in enumerate(steps):
            wanted = range(step, min(step + 2, len(steps))) if ahead else (step,)
            loader.schedule(
                [SlabRun(slabs[which], takes(steps[which]).forms, scene.blocks)] for which in wanted
            )
            if not ahead:
                for block, form in enumerate(takes(chosen).forms):
                    _wait(slabs[step], block, form)
            (latent,) = denoise_step(
                family, assembly, [row], [BlockInputs(CachedTokens(chosen, slabs[step]))]
            ).latents
            row = row.advanced(latent)
        wait_for(family.device)
        return (time.perf_counter() - began) * 1e3


def _wait(slabs: Slabs, block: int, form: BlockMode) -> None:
    if form is BlockMode.KV:
        slabs.keys_values(block)
    elif form is BlockMode.HIDDEN:
        slabs.hidden(block)
