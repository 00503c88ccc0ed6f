"""One checkpoint in this process: template runs and edits by the engine, without services around it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from giornata.model_cards import read_model_card
from giornata.packed.region import Region, region
from giornata.scheduling.batch import Capacity, RowKey
from giornata_denoiser.checkpoint import Checkpoint, load
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.engine.sources import ReuseOptions
from giornata_denoiser.families.rows import build_row
from giornata_denoiser.rows.correction import Correction
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import Recording, shared_noise, template_noise
from giornata_prepost.checkpoint import FAMILIES
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.masks import effective_alpha, model_mask
from giornata_prepost.images.pictures import Pixels
from giornata_tools.quality import cases
from tests.bench.compute import engines
from tests.fakes.masks import grown


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
    """Encoders, autoencoder and transformer of one checkpoint folder, by default on the CPU in float32."""

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        guidance: float,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        card, where = read_model_card(folder, None), torch.device(device)
        self.images = FAMILIES[card.family](folder, card, where, dtype)
        self.checkpoint: Checkpoint = load(folder, dtype=dtype, device=where)
        self.family = self.checkpoint.family
        self.steps, self.guidance = steps, guidance

    def template(self, request: Request, recording: RecordingSpec, steps: int) -> Recording:
        """A run over the request's picture with an empty mask and an empty prompt, recorded at each of its steps."""
        (tensors,) = self.images.encode_rows(
            request.image, np.zeros(request.mask.shape, np.uint8), [0], sampled=False
        )
        tensors = {**tensors, "noise": template_noise(*tensors["noise"].shape)}
        row = self._row(request, self._text(request, ""), tensors, steps)
        (done,) = self.run([replace(row, records=recording)])
        return Recording(request.name, row.grid, done.entries)

    def edit(self, request: Request, halo: int) -> Row:
        """A row that shares its template's noise outside of its region, which is not set: it computes everything."""
        alpha = effective_alpha(request.mask, 0, 0.0)
        height, width = request.mask.shape
        holes = model_mask(alpha, Size(width, height)).astype(np.uint8) * np.uint8(255)
        (tensors,) = self.images.encode_rows(request.image, holes, [request.seed], sampled=False)
        row = self._row(request, self._text(request, request.prompt), tensors, self.steps)
        where = self.region(row, halo)
        if where is None:
            return row
        tensors = {**tensors, "noise": shared_noise(tensors["noise"], where)}
        return self._row(request, self._text(request, request.prompt), tensors, self.steps)

    def _text(self, request: Request, prompt: str) -> dict[str, torch.Tensor]:
        return self.images.encode_text(prompt, Size.of(request.mask))

    def region(self, row: Row, halo: int) -> Region | None:
        """The compute set of a row."""
        return region(grown((row.conditioning["mask"].amax(dim=1) > 0).view(row.grid), halo))

    def run(self, rows: Iterable[Row], how: ReuseOptions | None = None) -> list[Row]:
        """The rows when they are done, in order."""
        ticks = count()
        capacity = Capacity(engines.ROWS, engines.TOKENS)
        engine = Engine(self.family, capacity, lambda: float(next(ticks)), reusing=self._placed(how))
        return engines.drained(engine, _numbered(rows))

    def corrections(self, rows: Sequence[Row], how: ReuseOptions) -> list[tuple[Correction, ...] | None]:
        """What the first step of `rows` teaches them."""
        capacity = Capacity(len(rows), engines.TOKENS)
        engine = Engine(self.family, capacity, lambda: 0.0, reusing=self._placed(how))
        return [row.corrections for row in engines.taught(engine, _numbered(rows))]

    def decode(self, row: Row) -> Pixels:
        """The model's picture of a finished row."""
        multiple = self.checkpoint.card.pixel_multiple
        return self.images.decode(row.latent, Size(row.grid[1] * multiple, row.grid[0] * multiple))

    def _placed(self, how: ReuseOptions | None) -> ReuseOptions:
        """Loads go to the family's device."""
        device = device_for(self.family.device, engines.DEVICE_BYTES)
        return replace(how or ReuseOptions(), device=device)

    def _row(self, request: Request, text: dict[str, Tensor], tensors: dict[str, Tensor], steps: int) -> Row:
        multiple = self.checkpoint.card.pixel_multiple
        height, width = (side // multiple for side in request.mask.shape)
        return build_row(
            self.family,
            RowKey(request.name, 1, 0),
            grid=(height, width),
            track=self.family.schedule.track(
                sampler=self.family.schedule.default_sampler, steps=steps, strength=1.0, cells=height * width
            ),
            text=text,
            conditioning=tensors,
            guidance_scale=self.guidance,
        )


def _numbered(rows: Iterable[Row]) -> list[Row]:
    """`rows` with keys of their own."""
    return [replace(row, key=RowKey(str(index), 1, 0)) for index, row in enumerate(rows)]


def box_of(mask: np.ndarray) -> np.ndarray:
    """(height, width) bool: the mask's bounding box."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box = np.zeros_like(mask)
    box[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = True
    return box


def held_out(side: int, limit: int) -> list[Request]:
    """`limit` of the edits that the model was not trained on, of pictures of `side` pixels."""
    slots = [slot for slot in cases.slots() if slot.side == side]
    return [
        Request(slot.name, case.scene.before, np.asarray(case.scene.mask), case.scene.caption, slot.index)
        for slot in cases.spread(slots, limit)
        for case in [cases.draw(slot)]
    ]
