"""A UNet checkpoint as prepost and the denoiser serve it, beside diffusers' own pipelines of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from giornata.families import Family
from giornata.model_cards import read_model_card
from giornata.schedulers import SOLVERS
from giornata.scheduling.batch import Capacity, RowKey
from giornata.tensors import pack, unpack
from giornata.wire.generations import carried_out, fitted
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters, GenerationParameters
from giornata.wire.resolution import cfg_scale, resolve
from giornata.wire.samplers import Sampler
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.checkpoint import load as load_network
from giornata_denoiser.engine.controls import ControlExecutor
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.families.rows import build_row
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.snapshot import Snapshot
from giornata_lab.baseline.pipeline import PIPELINES, opened
from giornata_prepost.checkpoint import FAMILIES
from giornata_prepost.families.protocol import GeneratingModel, ImageModel
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels

CPU = torch.device("cpu")
SIZE = Size(128, 64)
TEXT_TO_IMAGE = {
    Family.SD: diffusers.StableDiffusionPipeline,
    Family.SDXL: diffusers.StableDiffusionXLPipeline,
}
IMAGE_TO_IMAGE = {
    Family.SD: diffusers.StableDiffusionImg2ImgPipeline,
    Family.SDXL: diffusers.StableDiffusionXLImg2ImgPipeline,
}


@dataclass(frozen=True)
class Asked:
    """A request. `guidance_scale` and `sampler` are the checkpoint's own where they are None."""

    size: Size = SIZE
    steps: int = 4
    strength: float = 1.0
    guidance_scale: float | None = None
    sampler: Sampler | None = None
    negative_prompt: str | None = "blurry"
    seed: int = 7
    prompt: str = "a red hat on the dog"

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of edits and of generations alike."""
        told = {
            "prompt": self.prompt,
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance_scale,
            "sampler": self.sampler,
            "negative_prompt": self.negative_prompt,
        }
        return {name: value for name, value in told.items() if value is not None}


class Ended(NamedTuple):
    """What a pipeline ends with."""

    latents: Tensor
    """(tokens, channels), cut into tokens one by one."""
    picture: Pixels


@dataclass(frozen=True, eq=False)
class Served:
    """One checkpoint."""

    card: ModelCard
    images: ImageModel
    checkpoint: Checkpoint
    pipeline: Any
    """The family's inpainting pipeline."""

    @classmethod
    def open(cls, family: Family, folder: Path, dtype: torch.dtype = torch.float32) -> Served:
        """Load a checkpoint of `family`, once for each part."""
        card = read_model_card(folder)
        assert card.family == family
        images = FAMILIES[family](folder, card, CPU, dtype)
        network = load_network(folder, dtype=dtype, device=CPU)
        return cls(card, images, network, opened(PIPELINES[family], folder, dtype=dtype))

    def edit(
        self, asked: Asked, job: str = "edit", resume: Snapshot | None = None, *, whole: bool = False
    ) -> Row:
        """The row of an edit of :func:`picture`, by :func:`mask` or as a `whole`, through the bytes that travel."""
        given = EditParameters(**asked.fields, strength=asked.strength)
        parameters = resolve(given, self.card, asked.seed)
        (drawn,) = self.images.encode_rows(
            picture(asked.size),
            np.full_like(mask(asked.size), 255) if whole else mask(asked.size),
            [asked.seed],
            draws=bool(parameters.sampler and parameters.sampler.stochastic),
            strength=asked.strength,
        )
        return self._row(parameters, asked.size, drawn, job, resume=resume)

    def generation(self, asked: Asked, job: str = "generation", resume: Snapshot | None = None) -> Row:
        """The row of a generation, through the bytes that travel."""
        assert isinstance(self.images, GeneratingModel)
        asked_for = fitted(carried_out(GenerationParameters(**asked.fields)), self.card)
        parameters = resolve(asked_for, self.card, asked.seed)
        draws = bool(parameters.sampler and parameters.sampler.stochastic)
        (drawn,) = self.images.noise_rows(asked.size, [asked.seed], draws=draws)
        return self._row(parameters, asked.size, drawn, job, resume=resume, generated=True)

    def _row(
        self, parameters: EditParameters, size: Size, drawn: dict[str, Tensor], job: str, **how: Any
    ) -> Row:
        family, scale = self.checkpoint.family, cfg_scale(parameters, self.card)
        assert parameters.sampler is not None
        assert parameters.strength is not None
        text = self.images.encode_text(parameters.prompt, size)
        if scale is not None:
            text |= self.images.encode_unguided(parameters.negative_prompt, size)
        multiple = self.card.pixel_multiple
        return build_row(
            family,
            RowKey(job, 1, 0),
            grid=(size.height // multiple, size.width // multiple),
            track=family.schedule.track(
                sampler=parameters.sampler,
                steps=parameters.num_inference_steps or 0,
                strength=parameters.strength,
                cells=0,
            ),
            text=unpack(pack(text)),
            conditioning=unpack(pack(drawn)),
            guidance_scale=parameters.guidance_scale or 0.0,
            true_cfg_scale=scale,
            **how,
        )

    def edited(self, asked: Asked, pipeline: Any = None, **more: Any) -> Ended:
        """What the inpainting pipeline makes of the same, or another `pipeline`, which is told `more`."""
        shown = {
            "image": Image.fromarray(picture(asked.size)),
            "mask_image": Image.fromarray(mask(asked.size)),
            "strength": asked.strength,
            "width": asked.size.width,
            "height": asked.size.height,
        }
        chosen = self.pipeline if pipeline is None else pipeline
        return self._called(chosen, asked, self.card.default_guidance_scale, **shown, **more)

    def remade(self, asked: Asked) -> Ended:
        """What the image-to-image pipeline makes of the same picture."""
        pipeline = self._sibling(IMAGE_TO_IMAGE)
        shown = {"image": Image.fromarray(picture(asked.size)), "strength": asked.strength}
        return self._called(pipeline, asked, self.card.default_guidance_scale, **shown)

    def generated(self, asked: Asked) -> Ended:
        """What the text-to-image pipeline makes of the same."""
        size = {"width": asked.size.width, "height": asked.size.height}
        return self._called(self._sibling(TEXT_TO_IMAGE), asked, self.card.generation_guidance_scale, **size)

    def _sibling(self, kinds: Mapping[Family, Any]) -> Any:
        """Another pipeline over the same components."""
        pipeline = kinds[Family(self.card.family)].from_pipe(self.pipeline)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def _called(self, pipeline: Any, asked: Asked, scale: float | None, **shown: Any) -> Ended:
        latents: list[Tensor] = []

        def ended(_pipeline: Any, _step: int, _time: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            latents.append(tensors["latents"])
            return {}

        own, solver = pipeline.scheduler, SOLVERS[asked.sampler or Sampler(self.card.default_sampler)]
        pipeline.scheduler = getattr(diffusers, solver.scheduler).from_config(own.config, **solver.options)
        try:
            painted = pipeline(
                asked.prompt,
                negative_prompt=asked.negative_prompt,
                num_inference_steps=asked.steps,
                guidance_scale=scale if asked.guidance_scale is None else asked.guidance_scale,
                generator=torch.Generator().manual_seed(asked.seed),
                callback_on_step_end=ended,
                **shown,
            ).images[0]
        finally:
            pipeline.scheduler = own
        return Ended(tokens(latents[-1], self.card.token_latents), np.asarray(painted))


def denoised(of: Served, rows: Sequence[Row], controls: ControlExecutor | None = None) -> dict[str, Tensor]:
    """Final latents by job, of rows that share their batch and reuse nothing."""
    ticks = count()
    engine = Engine(
        of.checkpoint.family,
        Capacity(rows=8, tokens=1 << 20),
        lambda: float(next(ticks)),
        controls=controls,
    )
    engine.batch.submit(rows)
    ended: dict[str, Tensor] = {}
    while (report := engine.step()) is not None:
        assert report.failed == ()
        ended |= {row.key.job_id: row.latent for row in report.advanced if row.done}
    return ended


def tokens(latents: Tensor, side: int) -> Tensor:
    """(1, channels, h, w) cut into tokens of `side` latent pixels a side, one by one."""
    height, width = latents.shape[-2:]
    corners = [(y, x) for y in range(0, height, side) for x in range(0, width, side)]
    return torch.stack([latents[0, :, y : y + side, x : x + side].flatten() for y, x in corners])


def picture(size: Size) -> Pixels:
    """Noise, (height, width, 3)."""
    return np.random.default_rng(1).integers(0, 256, (size.height, size.width, 3), np.uint8)


def mask(size: Size) -> npt.NDArray[np.uint8]:
    """(height, width), neither symmetric nor aligned to latent pixels or tokens; 255 = edit."""
    marked = np.zeros((size.height, size.width), np.uint8)
    marked[5 : size.height // 2, 10 : size.width // 2 + 7] = 255
    return marked
