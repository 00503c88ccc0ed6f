"""The files of requests, made before the first of them leaves: pictures, generated or given, and masks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, pi
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from giornata_lab.loadgen.workload import MaskShape, WorkloadRequest
from giornata_tools.lora_profiler.probes import png, upright_size

Mask = NDArray[np.bool_]
"""(height, width); True is repainted."""
Distances = NDArray[np.floating[Any]]
"""(height, width), or what broadcasts to it: how far pixels are from a mask's centre."""

PICTURE_WAVES: Final = 6
"""How many waves a generated picture is made of."""
RIM_WAVES: Final = (2, 3, 5)
"""How many waves run around a blob's rim."""
RIM_DEPTH: Final = 0.12
"""Height of a wave as a share of the radius."""
MARGIN: Final = 2
"""Pixels around a patch's box: where it is small, the pixels nearest to its centre may lie beside it."""


@dataclass(frozen=True)
class TemplatePicture:
    """A picture that requests edit."""

    file: bytes
    width: int
    height: int


@dataclass(frozen=True)
class WorkloadImages:
    """Files by what they depend on."""

    templates: Mapping[int, TemplatePicture]
    masks: Mapping[WorkloadRequest, bytes]


def given(files: Sequence[bytes]) -> dict[int, TemplatePicture]:
    """Templates of encoded pictures, in order.

    Raises:
        ValueError: one of them is no picture; says the number.
    """
    found = {}
    for number, file in enumerate(files):
        try:
            found[number] = TemplatePicture(file, *upright_size(file))
        except ValueError as error:
            raise ValueError(f"picture {number}: {error}") from error
    return found


def made(
    requests: Sequence[WorkloadRequest], width: int, height: int, seed: int
) -> dict[int, TemplatePicture]:
    """The templates that `requests` edit, generated."""
    numbers = sorted({request.template for request in requests})
    return {
        number: TemplatePicture(generated(width, height, seed + number), width, height) for number in numbers
    }


def material(requests: Sequence[WorkloadRequest], templates: Mapping[int, TemplatePicture]) -> WorkloadImages:
    """Everything that `requests` are made of; `templates` has all that they edit."""
    masks = {}
    for request in requests:
        picture = templates[request.template]
        marked = mask(picture.width, picture.height, request.mask_ratio, request.shape, request.seed)
        masks[request] = mask_file(marked)
    return WorkloadImages(templates, masks)


def generated(width: int, height: int, seed: int) -> bytes:
    """A PNG of `width` x `height` pixels: soft waves of colour, others for every `seed`."""
    chance = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    planes = np.zeros((height, width, 3))
    for colour in range(3):
        for _ in range(PICTURE_WAVES):
            across, down, phase = chance.uniform(-4, 4), chance.uniform(-4, 4), chance.uniform(0, 2 * np.pi)
            planes[..., colour] += np.cos(2 * np.pi * (across * x + down * y) + phase)
    pixels = 127.5 + planes * (127.5 / PICTURE_WAVES)
    return png(Image.fromarray(pixels.round().astype(np.uint8)), compress_level=1)


def mask(width: int, height: int, ratio: float, shape: MaskShape, seed: int) -> Mask:
    """A connected patch of round(`ratio` x pixels) pixels, one at least: the ones nearest to its centre.

    It lies inside of the picture of `width` x `height` pixels where it fits, and fills what there is where it does not.
    Its place, and a blob's rim, are drawn from `seed`.
    """
    chance = np.random.default_rng(seed)
    count = min(max(1, round(ratio * width * height)), width * height)
    half = (
        count**0.5 / 2
        if shape is MaskShape.SQUARE
        else (count / pi) ** 0.5 * (1 + RIM_DEPTH * len(RIM_WAVES))
    )
    across, down = (_centre(side, half, chance) for side in (width, height))
    fits = 2 * half <= min(width, height)
    columns, rows = (
        _around(centre, half if fits else side, side) for centre, side in ((across, width), (down, height))
    )
    x = np.arange(columns.start, columns.stop, dtype=np.float32)[None] + np.float32(0.5 - across)
    y = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] + np.float32(0.5 - down)
    far = np.maximum(np.abs(x), np.abs(y)) if shape is MaskShape.SQUARE else _from_rim(x, y, chance)
    part = np.zeros(far.size, np.bool_)
    part[np.argpartition(far.ravel(), count - 1)[:count]] = True
    found = np.zeros((height, width), np.bool_)
    found[rows, columns] = part.reshape(far.shape)
    return found


def mask_file(marked: Mask) -> bytes:
    """`marked` as OpenAI's image API takes it: an RGBA PNG, transparent where the picture is repainted."""
    pixels = np.zeros((*marked.shape, 4), np.uint8)
    pixels[..., 3] = np.where(marked, np.uint8(0), np.uint8(255))
    return png(Image.fromarray(pixels), compress_level=1)


def _from_rim(x: Distances, y: Distances, chance: np.random.Generator) -> Distances:
    """Distance from (0, 0) over that of a rim, a circle with waves of random phases."""
    angle = np.arctan2(y, x)
    rim = np.ones_like(angle)
    for wave in RIM_WAVES:
        rim += np.float32(RIM_DEPTH) * np.sin(
            np.float32(wave) * angle + np.float32(chance.uniform(0, 2 * pi))
        )
    far: Distances = np.hypot(x, y) / rim
    return far


def _centre(side: int, half: float, chance: np.random.Generator) -> float:
    """Return where on a side the patch's centre lies."""
    room = side - 2 * half
    return float(half + room * chance.random()) if room > 0 else side / 2


def _around(centre: float, half: float, side: int) -> slice:
    """The pixels of a side that a patch may touch."""
    return slice(max(0, floor(centre - half) - MARGIN), min(side, ceil(centre + half) + MARGIN))
