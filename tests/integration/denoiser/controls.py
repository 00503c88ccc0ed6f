"""Tiny Flux ControlNets, and the pipelines of diffusers with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from diffusers import FluxControlNetInpaintPipeline, FluxControlNetModel, FluxMultiControlNetModel
from PIL import Image
from torch import Tensor

from giornata.control.networks import ControlNet, load
from giornata.scheduling.batch import Capacity
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.rows.row import Adapters, Row, RowControl
from tests.fakes.local_controls import controls_of
from tests.integration.denoiser.oracle import CPU, Edit, Model, picture_and_mask, row, text_inputs

PARTS = ("scheduler", "vae", "transformer", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")


def opened(made: FluxControlNetModel, folder: Path, dtype: torch.dtype) -> ControlNet:
    """The ControlNet through its files."""
    made.save_pretrained(folder)
    return load(folder, dtype, CPU)


@contextmanager
def wrapped(
    transformer: Any, made: FluxControlNetModel, hint: Tensor, conditioning_scale: float
) -> Iterator[None]:
    """Pipelines that know no ControlNets run the transformer with one: a negative prompt gets the positive's samples.

    `hint` is the control image's packed latents, (tokens, channels).
    """
    forward, net = transformer.forward, cast("Any", made)
    known: dict[float, Any] = {}

    def controlled(hidden_states: Tensor, **given: Any) -> Any:
        level = float(given["timestep"])
        shared = {
            name: given[name]
            for name in (
                "encoder_hidden_states",
                "pooled_projections",
                "timestep",
                "guidance",
                "txt_ids",
                "img_ids",
            )
        }
        if level not in known:
            known[level] = net(
                hidden_states=hidden_states[..., : hint.shape[-1]],
                controlnet_cond=hint[None],
                conditioning_scale=conditioning_scale,
                **shared,
                return_dict=False,
            )
        doubles, singles = known[level]
        return forward(
            hidden_states=hidden_states,
            **given,
            controlnet_block_samples=doubles,
            controlnet_single_block_samples=singles,
        )

    transformer.forward = controlled
    try:
        yield
    finally:
        del transformer.forward


class Caught:
    """What a pipeline drew, and gave its ControlNets."""

    def __init__(self) -> None:
        self.conditioning: dict[str, Tensor] = {}
        self.images: list[Tensor] = []


def inpainted(model: Model, edit: Edit, nets: Sequence[Any], how: dict[str, Any]) -> tuple[Tensor, Caught]:
    """(tokens, 64) of `FluxControlNetInpaintPipeline`, and what it drew."""
    several = len(nets) > 1
    pipe: Any = FluxControlNetInpaintPipeline(
        **{name: getattr(model.pipeline, name) for name in PARTS},
        controlnet=FluxMultiControlNetModel(list(nets)) if several else nets[0],
    )
    pipe.set_progress_bar_config(disable=True)
    caught = Caught()
    latents, masks = pipe.prepare_latents, pipe.prepare_mask_latents

    def prepare_latents(*args: Any, **options: Any) -> Any:
        found = latents(*args, **options)
        caught.conditioning |= {"noise": found[1][0], "image_latents": found[2][0]}
        return found

    def prepare_mask_latents(*args: Any, **options: Any) -> Any:
        found = masks(*args, **options)
        caught.conditioning["mask"] = found[0][0]
        return found

    pipe.prepare_latents, pipe.prepare_mask_latents = prepare_latents, prepare_mask_latents
    picture, mask = picture_and_mask(edit)
    controls = [control(edit, seed) for seed in range(len(nets))]
    given = {k: v[None] for k, v in text_inputs(model.dtype).items() if not k.startswith("negative_")}
    with seen(nets, caught):
        result: Tensor = pipe(
            **given,
            **how,
            image=picture,
            mask_image=mask,
            control_image=controls if several else controls[0],
            strength=edit.strength,
            height=edit.height,
            width=edit.width,
            num_inference_steps=edit.steps,
            guidance_scale=edit.guidance_scale,
            generator=torch.Generator().manual_seed(edit.seed),
            output_type="latent",
            max_sequence_length=48,
        ).images
    return result[0], caught


def control(edit: Edit, seed: int) -> Image.Image:
    random = np.random.default_rng(20 + seed)
    return Image.fromarray(random.integers(0, 255, (edit.height, edit.width, 3), dtype=np.uint8))


@contextmanager
def seen(nets: Sequence[Any], caught: Caught) -> Iterator[None]:
    """Keep what each net is given first."""
    hooks = []
    for made in nets:

        def keep(_: Any, args: Any, options: dict[str, Any], *, of: dict[str, Tensor]) -> None:
            of.setdefault("image", options["controlnet_cond"])

        of: dict[str, Tensor] = {}
        hooks.append((made.register_forward_pre_hook(_with(keep, of), with_kwargs=True), of))
    try:
        yield
    finally:
        for hook, of in hooks:
            hook.remove()
            caught.images.append(of["image"][0])


def _with(keep: Any, of: dict[str, Tensor]) -> Any:
    return lambda module, args, options: keep(module, args, options, of=of)


def controlled_row(
    model: Model, edit: Edit, caught: Caught, controls: Sequence[RowControl], index: int = 0
) -> Row:
    made = row(model, edit, caught.conditioning)
    return replace(
        made,
        key=replace(made.key, index=index),
        adapters=Adapters(controls=tuple(controls)).seeing(caught.images[: len(controls)]),
    )


def computed(model: Model, rows: Sequence[Row], nets: Sequence[ControlNet]) -> list[Tensor]:
    """The final latents of rows that share their steps."""
    ticks = count()
    engine = Engine(
        model.checkpoint.family,
        Capacity(rows=len(rows), tokens=1 << 20),
        lambda: float(next(ticks)),
        controls=controls_of(
            {one.card.digest: one for one in nets},
            model.checkpoint.family.network,
            model.checkpoint.card.pixel_multiple,
            held_steps=2,
        ),
    )
    engine.batch.submit(list(rows))
    ended: dict[Any, Tensor] = {}
    while (report := engine.step()) is not None:
        assert report.failed == ()
        ended |= {each.key: each.latent for each in report.advanced}
    return [ended[each.key] for each in rows]
