"""How well the adapters that ship do what they are for, on held-out edits through diffusers' own pipelines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch
from diffusers import DiffusionPipeline, FluxControlNetModel, FluxFillPipeline
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from giornata_lab.model.adapters import lessons
from giornata_lab.model.adapters.lessons import AdapterCard
from giornata_lab.model.fill import PATCH_CHANNELS, TEXT_TOKENS, decode, encode, pack
from giornata_lab.model.scenes import Scene, SceneTask, shapes
from giornata_lab.quality import cases
from giornata_lab.quality.cases import QualityCase
from giornata_lab.quality.metrics import ScoredAddition, check
from giornata_tools.checkout import TRAINED

Pixels = NDArray[np.uint8]


def edits(
    pipeline: DiffusionPipeline,
    scenes: Sequence[Scene],
    seeds: Sequence[int],
    prompts: Sequence[str] | None = None,
    **options: Any,
) -> list[Pixels]:
    """The edited pictures (side, side, 3): what was painted, pasted into what was there.

    Args:
        pipeline: an inpainting pipeline.
        scenes: of one size.
        seeds: of each edit's noise.
        prompts: by default the scenes' captions.
        options: of the pipeline's call.
    """
    side = scenes[0].before.shape[0]
    painted = pipeline(
        prompt=list(prompts or [scene.caption for scene in scenes]),
        image=[Image.fromarray(scene.before) for scene in scenes],
        mask_image=[shapes.image(scene.mask) for scene in scenes],
        height=side,
        width=side,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        **options,
    ).images
    return [
        np.where(scene.mask[..., None], np.asarray(picture), scene.before)
        for scene, picture in zip(scenes, painted, strict=True)
    ]


def fill_pipeline(checkpoint: Path) -> FluxFillPipeline:
    """The pipeline of a Flux-Fill checkpoint in float32, without a progress bar."""
    pipeline = FluxFillPipeline.from_pretrained(checkpoint, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@contextmanager
def controlled(
    pipeline: FluxFillPipeline, net: FluxControlNetModel, images: Sequence[Pixels], scale: float = 1.0
) -> Iterator[None]:
    """`pipeline` under a ControlNet: diffusers has no pipeline of Fill with one.

    Its unmodified transformer is given the residuals that `net` computes of the noisy latents alone, as
    `FluxControlNetInpaintPipeline` does. Of the control images' posteriors the mode is taken.

    Args:
        pipeline: of one or more edits at once.
        net: the ControlNet.
        images: (side, side, 3), one for each edit.
        scale: as the pipeline's `controlnet_conditioning_scale`.
    """
    pictures = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1
    control = pack(encode(pipeline.vae, pictures))

    def add(
        _module: torch.nn.Module, _args: object, given: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        names = (
            "encoder_hidden_states", "pooled_projections", "timestep", "guidance", "img_ids", "txt_ids",
        )  # fmt: skip
        double, single = net(
            hidden_states=given["hidden_states"][..., :PATCH_CHANNELS],
            controlnet_cond=control,
            conditioning_scale=scale,
            return_dict=False,
            **{name: given[name] for name in names},
        )
        residuals = {"controlnet_block_samples": double, "controlnet_single_block_samples": single}
        return (), {**given, **residuals}

    hook = pipeline.transformer.register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


AT_ONCE: Final = 10
SIDE: Final = 128
STEPS: Final = 20
GUIDANCE: Final = 30.0
OPTIONS: Final[dict[str, Any]] = {
    "num_inference_steps": STEPS,
    "guidance_scale": GUIDANCE,
    "max_sequence_length": TEXT_TOKENS,
}
BAND_PX: Final = 2.0
DARK: Final = 80
"""8-bit grey below which a rim's pixel counts as dark."""
REACH_PX: Final = 3.0
"""Farthest that a rim's darkness may lie from the edge."""

Figures = dict[str, float]
"""Means over all edits, by name."""


def additions(limit: int) -> list[QualityCase]:
    """`limit` of the held-out edits that paint a thing."""
    slots = [slot for slot in cases.slots() if slot.task is SceneTask.ADD and slot.side == SIDE]
    return [cases.draw(slot) for slot in cases.spread(slots, limit)]


def judge_swapped(pipeline: FluxFillPipeline, every: Sequence[QualityCase]) -> Figures:
    """Asked for each thing in the exchanged colour: how often `pipeline` paints the thing's own."""
    return _right(every, _painted(pipeline, every, lessons.swapped_caption))


def judge_outlined(pipeline: FluxFillPipeline, every: Sequence[QualityCase]) -> Figures:
    """Return how dark the rims of what is painted are, and how often colour and shape are as asked for."""
    return _rims(every, _painted(pipeline, every, str))


def judge_truth(every: Sequence[QualityCase]) -> Figures:
    """As `judge_outlined` of the pictures that `outlined` was taught by."""
    return _rims(every, [lessons.outlined(case.scene).after for case in every])


def judge_shown(pipeline: FluxFillPipeline, every: Sequence[QualityCase]) -> Figures:
    """As `judge_truth`, of these pictures encoded and decoded: the model can show no more of them."""
    pictures: list[Pixels] = []
    for first in range(0, len(every), AT_ONCE):
        scenes = [case.scene for case in every[first : first + AT_ONCE]]
        truth = torch.from_numpy(np.stack([lessons.outlined(scene).after for scene in scenes]))
        with torch.inference_mode():
            x = truth.permute(0, 3, 1, 2).float() / 127.5 - 1
            y = decode(pipeline.vae, encode(pipeline.vae, x))
        shown = ((y + 1) * 127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
        pairs = zip(shown, scenes, strict=True)
        pictures += [np.where(scene.mask[..., None], picture, scene.before) for picture, scene in pairs]
    return _rims(every, pictures)


def _rims(every: Sequence[QualityCase], pictures: Sequence[Pixels]) -> Figures:
    pairs = [(picture, case.scene) for picture, case in zip(pictures, every, strict=True)]
    measures = {"dark_rim": dark_rim, "closed_rim": closed_rim}
    found = {name: mean([measure(*pair) for pair in pairs]) for name, measure in measures.items()}
    return {**found, **_right(every, pictures)}


def dark_rim(edit: Pixels, scene: Scene) -> float:
    """Part of what was painted within `BAND_PX` of its own edge that is dark, 0 to 1; 0 where nothing was painted."""
    band = lessons.rim(lessons.changed(edit, scene), BAND_PX)
    return float((edit[band].mean(axis=1) < DARK).mean()) if band.any() else 0.0


def closed_rim(edit: Pixels, scene: Scene) -> float:
    """Part of the edge of what was painted that has something dark within `REACH_PX`, 0 to 1; 0 where nothing was."""
    painted = lessons.changed(edit, scene)
    dark = painted & (edit.mean(axis=2) < DARK)
    if not dark.any():
        return 0.0
    near = ndimage.distance_transform_edt(~dark) <= REACH_PX
    return float(near[lessons.rim(painted, 1.0)].mean())


def judge_outline(
    pipeline: FluxFillPipeline, net: FluxControlNetModel | None, scenes: Sequence[Scene]
) -> Figures:
    """Overlap of what is painted with the outlines that `net` is told; without one where it is None."""
    pictures: list[Pixels] = []
    for first in range(0, len(scenes), AT_ONCE):
        part = scenes[first : first + AT_ONCE]
        seeds = range(first, first + len(part))
        if net is None:
            pictures += edits(pipeline, part, seeds, **OPTIONS)
        else:
            images = [lessons.control_image(scene.asked, len(scene.mask)) for scene in part]
            with torch.inference_mode(), controlled(pipeline, net, images):
                pictures += edits(pipeline, part, seeds, **OPTIONS)
    return overlaps(pictures, scenes)


def overlaps(pictures: Sequence[Pixels], scenes: Sequence[Scene]) -> Figures:
    """Return how well `pictures` keep to their scenes' outlines; `tenth` is what a tenth of them stay below."""
    pairs = list(zip(pictures, scenes, strict=True))
    things = [lessons.overlap(*pair) for pair in pairs]
    return {
        "overlap": mean(things),
        "tenth": round(float(np.quantile(things, 0.1)), 4),
        "changed_overlap": mean([lessons.changed_overlap(*pair) for pair in pairs]),
    }


def _painted(
    pipeline: FluxFillPipeline, every: Sequence[QualityCase], prompt_of: Callable[[str], str]
) -> list[Pixels]:
    pictures: list[Pixels] = []
    for first in range(0, len(every), AT_ONCE):
        part = every[first : first + AT_ONCE]
        prompts = [prompt_of(case.scene.caption) for case in part]
        seeds = [case.slot.index for case in part]
        pictures += edits(pipeline, [case.scene for case in part], seeds, prompts, **OPTIONS)
    return pictures


def _right(every: Sequence[QualityCase], pictures: Sequence[Pixels]) -> Figures:
    found = [
        ScoredAddition(case, picture, check(picture, case.bare, case.scene.mask))
        for case, picture in zip(every, pictures, strict=True)
    ]
    names = ("both_right", "colour_right", "shape_right")
    return {name: mean([float(getattr(one, name)) for one in found]) for name in names}


def mean(values: Sequence[float]) -> float:
    """To four places."""
    return round(statistics.mean(values), 4)


NAMES: Final = ("outlined", "swapped", "outline")


@click.command(context_settings={"show_default": True})
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option("--limit", type=click.IntRange(1), default=100, help="Held-out edits of each.")
@click.option("--threads", type=int, default=1, help="CPU threads.")
def main(*, names: tuple[str, ...], limit: int, threads: int) -> None:
    """Measure NAMES, by default all, on held-out edits through diffusers' pipelines; rewrites their cards."""
    torch.set_num_threads(threads)
    for name in names or NAMES:
        one = lessons.read_card(name)
        measured = {"edits": float(limit), **figures(one, limit)}
        click.echo(f"{name}: {measured}")
        one.model_copy(update={"measured": measured}).write()


def figures(one: AdapterCard, limit: int) -> Figures:
    """With the adapter, without it, and of the truth where that is another."""
    pipeline = fill_pipeline(TRAINED)
    if one.name == "outline":
        scenes = lessons.held_out(limit)
        net = FluxControlNetModel.from_pretrained(one.file.parent, dtype=torch.float32).eval()
        return {
            **judge_outline(pipeline, net, scenes),
            **_named("without", judge_outline(pipeline, None, scenes)),
            **_named("truth", overlaps([scene.after for scene in scenes], scenes)),
        }
    every = additions(limit)
    judge = {"outlined": judge_outlined, "swapped": judge_swapped}[one.name]
    without = judge(pipeline, every)
    truth: Figures = {}
    if one.name == "outlined":
        shown = judge_shown(pipeline, every)
        truth = {**_named("truth", judge_truth(every)), **_named("shown", shown)}
    pipeline.load_lora_weights(one.file.parent, weight_name=one.file.name, adapter_name=one.name)
    pipeline.set_adapters(one.name)
    return {**judge(pipeline, every), **_named("without", without), **truth}


def _named(prefix: str, found: Figures) -> Figures:
    return {f"{prefix}_{name}": value for name, value in found.items()}


if __name__ == "__main__":
    main()
