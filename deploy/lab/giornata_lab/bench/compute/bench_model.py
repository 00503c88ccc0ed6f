"""One checkpoint in this process: template runs and edits by the engine, without services around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from giornata.model_cards import read_model_card
from giornata.packed.packing import Region, region_of
from giornata.scheduling.batch import Capacity, RowKey
from giornata.wire.models import Sampler
from giornata.wire.requests import EditParameters
from giornata.wire.resolution import cfg_scale
from giornata_denoiser.checkpoint import Checkpoint, load
from giornata_denoiser.engine.batch_tensors import ControlPart, LowRanks
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families.network import build_row
from giornata_denoiser.rows.parts import NO_ADAPTERS, Adapters
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate, template_noise
from giornata_lab.bench.compute import engines
from giornata_lab.quality import cases
from giornata_prepost.checkpoint import FAMILIES
from giornata_prepost.images.masks import compute_set, effective_alpha, model_mask
from giornata_prepost.images.pictures import Pixels, Size


@dataclass(frozen=True, eq=False)
class Request:
    """One edit."""

    name: str
    image: Pixels
    mask: np.ndarray
    """(height, width) bool."""
    prompt: str
    seed: int


class BenchModel:
    """Encoders, autoencoder and network of one checkpoint folder, by default on the CPU in float32.

    Args:
        folder: the checkpoint.
        steps: of edits.
        guidance: scale of edits, embedded or classifier-free; None for the checkpoint's default.
        sampler: of edits; None for the checkpoint's own.
        device: of the network.
        dtype: of all tensors.
        low_ranks: LoRAs that rows may have.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        guidance: float | None = None,
        sampler: Sampler | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        low_ranks: LowRanks | None = None,
    ) -> None:
        card, where = read_model_card(folder, None), torch.device(device)
        self.images = FAMILIES[card.family](folder, card, where, dtype)
        self.checkpoint: Checkpoint = load(folder, dtype=dtype, device=where)
        self.family = self.checkpoint.family
        self._low_ranks = low_ranks
        self.steps = steps
        self.guidance = card.default_guidance_scale if guidance is None else guidance
        self.sampler = sampler or self.family.schedule.default_sampler
        asked = EditParameters(prompt="any", guidance_scale=self.guidance)
        self._cfg_scale = cfg_scale(asked, card)

    def template(
        self,
        request: Request,
        recording: RecordingSpec,
        steps: int,
        adapters: Adapters = NO_ADAPTERS,
        noise: Tensor | None = None,
    ) -> CachedTemplate:
        """A run over the request's picture with an empty mask and an empty prompt, recorded at each of its steps.

        The product records without `adapters`, and with the same `noise` for all edits.
        """
        (tensors,) = self.images.encode_rows(
            request.image, np.zeros(request.mask.shape, np.uint8), [0], modes=True
        )
        if noise is None:
            noise = template_noise(*tensors["noise"].shape)
        tensors = {**tensors, "noise": noise}
        sampler = self.family.schedule.recorder
        row = self._row(request, self._text(request, ""), tensors, steps, sampler)
        (done,) = self.run([replace(row, records=recording, adapters=adapters)])
        return CachedTemplate(request.name, row.grid, done.entries)

    def edit(self, request: Request, halo: int | None) -> Row:
        """A row that computes everything: its region is not set.

        With a `halo` it has a template's noise outside of its region, as rows that take from one have; without, its
        own, as with `reuse=off` and of a miss.
        """
        where = None if halo is None else self.region(request, halo)
        (tensors,) = self.images.encode_rows(
            request.image,
            self._mask(request).astype(np.uint8) * np.uint8(255),
            [request.seed],
            draws=self.sampler.stochastic,
        )
        if where is not None:
            noise = CachedTemplate("any", (0, 0), ()).noise_beside(tensors["noise"], where)
            tensors = {**tensors, "noise": noise}
        text = self._text(request, request.prompt)
        if self._cfg_scale is not None:
            text |= self.images.encode_unguided(None, Size.of(request.mask))
        return self._row(request, text, tensors, self.steps, self.sampler)

    def region(self, request: Request, halo: int) -> Region | None:
        """The compute set of an edit, as its inspection tells it."""
        found = compute_set(self._mask(request), halo, self.checkpoint.card.pixel_multiple)
        return None if found is None else region_of(found)

    def _mask(self, request: Request) -> NDArray[np.bool_]:
        """(height, width): what the model is to repaint."""
        return model_mask(
            effective_alpha(request.mask, 0, 0.0), Size.of(request.mask), self.checkpoint.card.mask_grain
        )

    def _text(self, request: Request, prompt: str) -> dict[str, Tensor]:
        return self.images.encode_text(prompt, Size.of(request.mask))

    def run(
        self,
        rows: Iterable[Row],
        how: ReuseOptions | None = None,
        controls: ControlPart | None = None,
        told: Callable[[StepReport], object] = lambda _: None,
    ) -> list[Row]:
        """The rows when they are done, in order; `controls` computes their ControlNets, and of steps is `told`."""
        ticks = count()
        engine = Engine(
            self.family,
            Capacity(engines.ROWS, engines.TOKENS),
            lambda: float(next(ticks)),
            reusing=self._placed(how),
            low_ranks=self._low_ranks,
            controls=controls,
        )
        return engines.drained(engine, _numbered(rows), told)

    def begun(self, row: Row, steps: int, how: ReuseOptions | None = None) -> Row:
        """`row` after its next `steps`, with what they teach it."""
        engine = Engine(self.family, Capacity(1, engines.TOKENS), lambda: 0.0, reusing=self._placed(how))
        (found,) = engines.advanced(engine, [row], steps)
        return found

    def decode(self, row: Row) -> Pixels:
        """The model's picture of a finished row."""
        multiple = self.checkpoint.card.pixel_multiple
        return self.images.decode(row.latent, Size(row.grid[1] * multiple, row.grid[0] * multiple))

    def _placed(self, how: ReuseOptions | None) -> ReuseOptions:
        """Loads go to the family's device."""
        device = device_for(self.family.device, engines.DEVICE_BYTES)
        return replace(how or ReuseOptions(), device=device)

    def _row(
        self,
        request: Request,
        text: dict[str, Tensor],
        tensors: dict[str, Tensor],
        steps: int,
        sampler: Sampler,
    ) -> Row:
        multiple = self.checkpoint.card.pixel_multiple
        height, width = (side // multiple for side in request.mask.shape)
        return build_row(
            self.family,
            RowKey(request.name, 1, 0),
            grid=(height, width),
            track=self.family.schedule.track(
                sampler=sampler, steps=steps, strength=1.0, cells=height * width
            ),
            text=text,
            conditioning=tensors,
            guidance_scale=self.guidance,
            true_cfg_scale=self._cfg_scale,
        )


def _numbered(rows: Iterable[Row]) -> list[Row]:
    """`rows` with keys of their own."""
    return [replace(row, key=RowKey(str(index), 1, 0)) for index, row in enumerate(rows)]


def held_out(side: int, limit: int) -> list[Request]:
    """`limit` of the edits that the model was not trained on, of pictures of `side` pixels."""
    slots = [slot for slot in cases.slots() if slot.side == side]
    return [
        Request(slot.name, case.scene.before, np.asarray(case.scene.mask), case.scene.caption, slot.index)
        for slot in cases.spread(slots, limit)
        for case in [cases.draw(slot)]
    ]
