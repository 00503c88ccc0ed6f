"""A job's way from prepost through the denoiser, without messages: rows from prepost's bytes, and their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from giornata.model_cards import read_model_card
from giornata.planning.plans import BatchPlanner, plan_batch
from giornata.scheduling.batch import Capacity, RowKey
from giornata.tensors import pack, unpack
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters, GenerationParameters
from giornata.wire.resolution import carried_out, cfg_scale, fitted, resolve
from giornata_denoiser.checkpoint import Checkpoint, load, open_checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.engine.batch_tensors import ControlPart
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families.network import build_row
from giornata_denoiser.rows.row import Row, Snapshot
from giornata_prepost.checkpoint import FAMILIES, open_model
from giornata_prepost.config import PrepostConfig
from giornata_prepost.families.pipeline import Condition, ImageModel, no_condition
from giornata_prepost.images.pictures import Pixels, Size
from tests.distances import distance


@dataclass(frozen=True)
class Served:
    """A checkpoint as prepost and as the denoiser has it."""

    images: ImageModel
    checkpoint: Checkpoint

    @property
    def card(self) -> ModelCard:
        return self.images.card

    def edited(
        self,
        key: str,
        parameters: EditParameters,
        image: Pixels,
        mask: npt.NDArray[np.uint8],
        *,
        sampled: bool = True,
        references: Sequence[Pixels] = (),
        resume: Snapshot | None = None,
        first: Condition = no_condition,
    ) -> Row:
        """The row of an edit's first seed; `image` and `mask` are of the model's size, and `first` draws first."""
        size = Size(image.shape[1], image.shape[0])
        (drawn,) = self.images.encode_rows(
            image,
            mask,
            [parameters.seed or 0],
            modes=not sampled,
            draws=_draws(parameters),
            strength=parameters.strength or 0,
            first=first,
        )
        return self._row(key, parameters, size, drawn, references, image, resume)

    def generated(
        self,
        key: str,
        parameters: EditParameters,
        size: Size,
        references: Sequence[Pixels] = (),
        resume: Snapshot | None = None,
        first: Condition = no_condition,
    ) -> Row:
        """The row of a generation's first seed."""
        seeds = [parameters.seed or 0]
        (drawn,) = self.images.noise_rows(size, seeds, draws=_draws(parameters), first=first)
        return self._row(key, parameters, size, drawn, references, None, resume)

    def _row(
        self,
        key: str,
        asked: EditParameters,
        size: Size,
        drawn: dict[str, Tensor],
        references: Sequence[Pixels],
        image: Pixels | None,
        resume: Snapshot | None,
    ) -> Row:
        """Through the bytes that travel; `image` is what is edited, None for a generation."""
        family, multiple = self.checkpoint.family, self.card.pixel_multiple
        grid = (size.height // multiple, size.width // multiple)
        seen = () if image is None else (image, *references)
        text, scale = self.images.encode_text(asked.prompt, size, seen), cfg_scale(asked, self.card)
        if scale is not None:
            text |= self.images.encode_unguided(asked.negative_prompt, size, seen)
        return build_row(
            family,
            RowKey(key, 1, 0),
            grid=grid,
            track=family.schedule.track(
                sampler=asked.sampler or family.schedule.default_sampler,
                steps=asked.num_inference_steps or 0,
                strength=asked.strength or 0,
                cells=grid[0] * grid[1],
            ),
            text=unpack(pack(text)),
            conditioning=unpack(pack(drawn)),
            guidance_scale=asked.guidance_scale or 0.0,
            true_cfg_scale=scale,
            partial_images=asked.partial_images,
            resume=resume,
            generated=image is None,
            references=[self._encoded(reference) for reference in references],
        )

    def _encoded(self, reference: Pixels) -> Tensor:
        return self.images.encode_reference(reference)


def _draws(asked: EditParameters) -> bool:
    return bool(asked.sampler and asked.sampler.stochastic)


def served(folder: Path, dtype: torch.dtype | None = None) -> Served:
    """A checkpoint as services open it, or in another dtype."""
    if dtype is None:
        return Served(
            open_model(PrepostConfig(model=str(folder), device="cpu")),
            open_checkpoint(DenoiserConfig(model=str(folder), device="cpu")),
        )
    card, device = read_model_card(folder), torch.device("cpu")
    return Served(
        FAMILIES[card.family](folder, card, device, dtype), load(folder, dtype=dtype, device=device)
    )


def of_edit(card: ModelCard, **fields: Any) -> EditParameters:
    """Resolved parameters, as the gateway makes them."""
    return resolve(EditParameters.model_validate(fields), card, seed=5)


def of_generation(card: ModelCard, **fields: Any) -> EditParameters:
    """Resolved parameters of a generation, as the gateway makes them."""
    given = GenerationParameters.model_validate(fields)
    return resolve(fitted(carried_out(given), card), card, seed=5)


def ended(
    checkpoint: Checkpoint,
    rows: Sequence[Row],
    controls: ControlPart | None = None,
    planner: BatchPlanner = plan_batch,
) -> dict[str, Row]:
    """Rows that share their batch, after their last step."""
    ticks = count()
    engine = Engine(
        checkpoint.family,
        Capacity(rows=8, tokens=1 << 20),
        lambda: float(next(ticks)),
        controls=controls,
        reusing=ReuseOptions(planner=planner),
    )
    engine.batch.submit(rows)
    done: dict[str, Row] = {}
    while (report := engine.step()) is not None:
        assert report.failed == ()
        done |= {row.key.job_id: row for row in report.advanced if row.done}
    return done


def final_latent(of: Served, row: Row) -> Tensor:
    """The latent of a row that is computed alone."""
    return ended(of.checkpoint, [row])[row.key.job_id].latent


def assert_paints(of: Served, row: Row, size: Size, latents: Tensor, painted: Pixels, within: float) -> None:
    """A row that is computed alone has these latents, and their picture."""
    mine = final_latent(of, row)
    assert distance(mine, latents) <= within
    decoded = of.images.decode(mine, size).astype(int)
    assert np.abs(decoded - painted.astype(int)).max() <= 1
    assert painted.std() > 5
