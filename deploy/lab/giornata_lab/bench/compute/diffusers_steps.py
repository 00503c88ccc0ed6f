"""A step of diffusers' own loop over a static batch: the module's forward, the scheduler's step, the blend after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UNet2DConditionModel
from torch import Tensor
from torch.nn import functional

from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute.families import DISCRETE
from giornata_lab.bench.compute.tiny_flux import SCHEDULER

Forward = Callable[[Tensor], Tensor]
"""The prediction for the latents of a batch, both (rows, ...) as the module has them."""


class DiffusersStep:
    """What a pipeline's loop does in one step to `batch`, rows of one size and step.

    `module` is diffusers' own, with the weights of the family of `rows` and no hooks.
    """

    def __init__(
        self,
        name: str,
        module: Any,
        of: ModelFamily,
        batch: Sequence[Row],
        texts: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self.of, self.grid = of, batch[0].grid
        self.maps = name in {"sd", "sdxl", "sd3", "z-image"}
        """Whether latents are (rows, channels, height, width); else they are (rows, tokens, channels)."""
        self.latents = self._native([row.latent for row in batch])
        self.picture, self._noise, self._mask = (
            self._native([row.conditioning[part] for row in batch])
            for part in ("image_latents", "noise", "mask")
        )
        self._time = batch[0].track.times[:1].to(of.device)
        self.text = {
            name: torch.stack([text[name] for text in texts]).to(of.device, of.dtype)
            for name in of.text.tensors
        }
        """The prompts' tensors of all rows, (rows, ...) each."""
        self._forward: Forward = FORWARDS[name](module, self)
        self._move = _discrete(batch) if isinstance(module, UNet2DConditionModel) else _flow(batch)

    @property
    def time(self) -> Tensor:
        """(rows,): what the module is told."""
        return self._time.expand(len(self.latents))

    def predicted(self) -> Tensor:
        """(rows * tokens, channels): the module's output, packed as rows are."""
        out = self._forward(self.latents)
        return torch.cat([self.of.network.packed(one) for one in out]) if self.maps else out.flatten(0, 1)

    def __call__(self) -> Tensor:
        """The latents after the step."""
        after, outside = self._move(self._forward(self.latents), self.latents, self.picture, self._noise)
        return (1 - self._mask) * outside + self._mask * after

    def _native(self, parts: Sequence[Tensor]) -> Tensor:
        if self.maps:
            parts = [self.of.network.unpacked(part, self.grid) for part in parts]
        return torch.stack(list(parts)).to(self.of.device, self.of.dtype)


Move = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Prediction, latents, picture, noise → the latents after the step, and the picture at their noise level."""


def _flow(batch: Sequence[Row]) -> Move:
    scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER)
    scheduler.set_timesteps(sigmas=batch[0].track.levels[:-1].tolist(), mu=0.5)
    time, then = scheduler.timesteps[0], scheduler.timesteps[1:2]

    def moved(velocity: Tensor, latents: Tensor, picture: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        scheduler._step_index = 0
        after = scheduler.step(velocity, time, latents, return_dict=False)[0]
        return after, scheduler.scale_noise(picture, then, noise)

    return moved


def _discrete(batch: Sequence[Row]) -> Move:
    scheduler: Any = DDIMScheduler(**{name: value for name, value in DISCRETE.items() if name[0] != "_"})
    scheduler.set_timesteps(batch[0].steps)
    time, then = scheduler.timesteps[0], scheduler.timesteps[1:2]

    def moved(output: Tensor, latents: Tensor, picture: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        after = scheduler.step(output, time, latents, return_dict=False)[0]
        return after, scheduler.add_noise(picture, noise, then)

    return moved


def _positions(of: ModelFamily, grid: tuple[int, int], *, axes: int, first: int = 0) -> Tensor:
    """(tokens, axes): number of the picture, line and column of its tokens."""
    cells = torch.cartesian_prod(*(torch.arange(side, device=of.device) for side in grid))
    return functional.pad(cells, (1, axes - 3)) + torch.tensor([first] + [0] * (axes - 1), device=of.device)


def _unet(module: Any, step: DiffusersStep) -> Forward:
    beside = {"text_embeds": "pooled_prompt_embeds", "time_ids": "add_time_ids"}
    added = {to: step.text[name] for to, name in beside.items() if name in step.text}
    embeds = step.text["prompt_embeds"]

    def forward(latents: Tensor) -> Tensor:
        out: Tensor = module(latents, step.time, embeds, added_cond_kwargs=added, return_dict=False)[0]
        return out

    return forward


def _sd3(module: Any, step: DiffusersStep) -> Forward:

    def forward(latents: Tensor) -> Tensor:
        embeds, pooled = step.text["prompt_embeds"], step.text["pooled_prompt_embeds"]
        out: Tensor = module(latents, embeds, pooled, step.time, return_dict=False)[0]
        return out

    return forward


def _z_image(module: Any, step: DiffusersStep) -> Forward:
    captions = list(step.text["prompt_embeds"])

    def forward(latents: Tensor) -> Tensor:
        time = (1000 - step.time) / 1000
        out = module(list(latents.unsqueeze(2)), time, captions, return_dict=False)[0]
        return -torch.stack(list(out)).squeeze(2)

    return forward


def _flux2(module: Any, step: DiffusersStep) -> Forward:
    """The picture's clean tokens behind the noisy ones, as the inpainting pipeline has them."""
    of, grid = step.of, step.grid
    embeds, clean = step.text["prompt_embeds"], step.picture
    text_ids = functional.pad(torch.arange(embeds.shape[1], device=of.device)[:, None], (3, 0))
    ids = torch.cat([_positions(of, grid, axes=4, first=first) for first in (0, 10)])
    embedded = module.config.guidance_embeds
    guidance = torch.full((len(step.latents),), 3.5, device=of.device) if embedded else None

    def forward(latents: Tensor) -> Tensor:
        both = torch.cat((latents, clean), 1)
        out: Tensor = module(both, embeds, step.time / 1000, ids, text_ids, guidance, return_dict=False)[0]
        return out[:, : latents.shape[1]]

    return forward


def _qwen_image(module: Any, step: DiffusersStep) -> Forward:
    embeds, shapes = step.text["prompt_embeds"], [[(1, *step.grid)]] * len(step.latents)

    def forward(latents: Tensor) -> Tensor:
        out: Tensor = module(latents, embeds, None, step.time / 1000, shapes, return_dict=False)[0]
        return out

    return forward


def _qwen_image_edit(module: Any, step: DiffusersStep) -> Forward:
    """The picture's clean tokens behind the noisy ones, as the pipelines have them."""
    embeds, clean = step.text["prompt_embeds"], step.picture
    shapes = [[(1, *step.grid)] * 2] * len(step.latents)

    def forward(latents: Tensor) -> Tensor:
        both = torch.cat((latents, clean), 1)
        out: Tensor = module(both, embeds, None, step.time / 1000, shapes, return_dict=False)[0]
        return out[:, : latents.shape[1]]

    return forward


def _flux(module: Any, step: DiffusersStep) -> Forward:
    """Flux; Chroma has neither pooled text nor guidance."""
    embeds = step.text["prompt_embeds"]
    more: dict[str, Tensor] = {}
    if "pooled_prompt_embeds" in step.text:
        guidance = torch.full((len(step.latents),), 3.5, device=step.of.device)
        more = {"pooled_projections": step.text["pooled_prompt_embeds"], "guidance": guidance}
    ids = _positions(step.of, step.grid, axes=3).to(step.of.dtype)
    text_ids = torch.zeros(embeds.shape[1], 3, device=ids.device, dtype=ids.dtype)

    def forward(latents: Tensor) -> Tensor:
        out: Tensor = module(
            latents,
            embeds,
            timestep=step.time / 1000,
            img_ids=ids,
            txt_ids=text_ids,
            return_dict=False,
            **more,
        )[0]
        return out

    return forward


FORWARDS: dict[str, Callable[[Any, DiffusersStep], Forward]] = {
    "flux": _flux,
    "chroma": _flux,
    "sd": _unet,
    "sdxl": _unet,
    "sd3": _sd3,
    "z-image": _z_image,
    **dict.fromkeys(("flux2", "flux2-klein"), _flux2),
    "qwen-image": _qwen_image,
    "qwen-image-edit-plus": _qwen_image_edit,
}
"""By family: what the forward of diffusers' module is over rows of one size."""
