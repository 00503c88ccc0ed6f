"""What makes control images of pictures, without weights. Pictures are (height, width, 3) uint8, and so are results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import pi, sqrt
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import ndimage
from skimage import feature

from giornata.wire.adapters import Annotator
from giornata_prepost.images.pictures import Pixels

CANNY_LOW: Final = 100
CANNY_HIGH: Final = 200
"""Thresholds of the Sobel gradient of 8-bit greys, which are not smoothed: as the examples of diffusers call
`cv2.Canny`, and as ControlNets are trained. Gradients are measured by their length, there by the sum of their parts."""
SOFT_SIGMA: Final = 1.5
"""Width of a soft edge, in pixels."""
SOFT_GAIN: Final = 2.0
"""An edge between colours that differ by 1 / gain of the whole range is white."""
TILE_FACTOR: Final = 8
"""How many times smaller the picture gets, as the preprocessor of ControlNet 1.1's tile model does."""


def canny(picture: Pixels) -> Pixels:
    """White lines on black (Canny, PAMI 1986), two pixels wide at most; none along the picture's border."""
    grey = np.asarray(Image.fromarray(picture).convert("L"), np.float32) / np.float32(255)
    edges = feature.canny(grey, sigma=0, low_threshold=CANNY_LOW / 255, high_threshold=CANNY_HIGH / 255)
    return _grey(np.asarray(edges) * np.uint8(255))


def soft_edge(picture: Pixels) -> Pixels:
    """Soft white edges on black: the largest of the three colours' gradients, each smoothed by a Gaussian.

    This is no learnt detector as HED or PidiNet: texture shows as outlines do. A step by a height h shows as a Gaussian
    of that sigma and of the height :data:`SOFT_GAIN` * h, cut at white.
    """
    colours = picture.astype(np.float32)
    gradients = [
        ndimage.gaussian_gradient_magnitude(colours[..., colour], SOFT_SIGMA, mode="nearest")
        for colour in range(3)
    ]
    height = np.max(gradients, axis=0) * np.float32(SOFT_GAIN * SOFT_SIGMA * sqrt(2 * pi))
    return _grey(np.rint(np.minimum(height, 255)).astype(np.uint8))


def tile(picture: Pixels) -> Pixels:
    """The picture without its details: averaged over squares of :data:`TILE_FACTOR` pixels, and scaled up smoothly."""
    image = Image.fromarray(picture)
    return np.asarray(image.reduce(TILE_FACTOR).resize(image.size, Image.Resampling.BICUBIC))


ANNOTATORS: Final[Mapping[Annotator, Callable[[Pixels], Pixels]]] = {
    Annotator.CANNY: canny,
    Annotator.SOFT_EDGE: soft_edge,
    Annotator.TILE: tile,
}


def _grey(values: npt.NDArray[np.uint8]) -> Pixels:
    """(height, width) as a picture."""
    return np.repeat(values[..., None], 3, axis=2)
