"""How well the adapters that ship do what they are for, on held-out edits through diffusers' own pipelines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from diffusers import FluxControlNetModel, FluxFillPipeline

from giornata_tools.model.adapters import looks, silhouettes
from giornata_tools.model.architecture import TEXT_TOKENS
from giornata_tools.model.painting import Pixels, controlled, edits
from giornata_tools.model.scenes import Scene, Task
from giornata_tools.quality import cases
from giornata_tools.quality.cases import Case
from giornata_tools.quality.checker import CHANGED, check
from giornata_tools.quality.scoring import Addition

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

Figures = dict[str, float]
"""Means over all edits, by name."""


def additions(limit: int) -> list[Case]:
    """`limit` of the held-out edits that paint a thing."""
    slots = [slot for slot in cases.slots() if slot.task is Task.ADD and slot.side == SIDE]
    return [cases.draw(slot) for slot in cases.spread(slots, limit)]


def judge_swapped(pipeline: FluxFillPipeline, every: Sequence[Case]) -> Figures:
    """Asked for each thing in the exchanged colour: how often `pipeline` paints the thing's own."""
    return _right(every, _painted(pipeline, every, looks.swapped_caption))


def judge_outlined(pipeline: FluxFillPipeline, every: Sequence[Case]) -> Figures:
    """How dark the rims of what is painted are, and how often colour and shape are as asked for."""
    pictures = _painted(pipeline, every, str)
    dark = [dark_rim(picture, case.scene) for picture, case in zip(pictures, every, strict=True)]
    return {"dark_rim": mean(dark), **_right(every, pictures)}


def judge_truth(every: Sequence[Case]) -> Figures:
    """As `judge_outlined` of the pictures that `outlined` was taught by."""
    pictures = [looks.outlined(case.scene).after for case in every]
    dark = [dark_rim(picture, case.scene) for picture, case in zip(pictures, every, strict=True)]
    return {"dark_rim": mean(dark), **_right(every, pictures)}


def dark_rim(edit: Pixels, scene: Scene) -> float:
    """Part of what was painted within `BAND_PX` of its own edge that is dark, 0 to 1; 0 where nothing was painted."""
    away = np.linalg.norm((edit.astype(np.float32) - scene.before) / 255, axis=2)
    band = looks.rim(scene.mask & (away > CHANGED), BAND_PX)
    return float((edit[band].mean(axis=1) < DARK).mean()) if band.any() else 0.0


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
            images = [silhouettes.control_image(scene.asked, len(scene.mask)) for scene in part]
            with torch.inference_mode(), controlled(pipeline, net, images):
                pictures += edits(pipeline, part, seeds, **OPTIONS)
    return overlaps(pictures, scenes)


def overlaps(pictures: Sequence[Pixels], scenes: Sequence[Scene]) -> Figures:
    """How well `pictures` keep to their scenes' outlines; `tenth` is what a tenth of them stay below."""
    pairs = list(zip(pictures, scenes, strict=True))
    things = [silhouettes.overlap(*pair) for pair in pairs]
    return {
        "overlap": mean(things),
        "tenth": round(float(np.quantile(things, 0.1)), 4),
        "changed_overlap": mean([silhouettes.changed_overlap(*pair) for pair in pairs]),
    }


def _painted(
    pipeline: FluxFillPipeline, every: Sequence[Case], prompt_of: Callable[[str], str]
) -> list[Pixels]:
    pictures: list[Pixels] = []
    for first in range(0, len(every), AT_ONCE):
        part = every[first : first + AT_ONCE]
        prompts = [prompt_of(case.scene.caption) for case in part]
        seeds = [case.slot.index for case in part]
        pictures += edits(pipeline, [case.scene for case in part], seeds, prompts, **OPTIONS)
    return pictures


def _right(every: Sequence[Case], pictures: Sequence[Pixels]) -> Figures:
    found = [
        Addition(case, picture, check(picture, case.bare, case.scene.mask))
        for case, picture in zip(every, pictures, strict=True)
    ]
    names = ("both_right", "colour_right", "shape_right")
    return {name: mean([float(getattr(one, name)) for one in found]) for name in names}


def mean(values: Sequence[float]) -> float:
    """To four places."""
    return round(statistics.mean(values), 4)
