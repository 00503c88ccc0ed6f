"""The painted picture into the original: the compositing of every edit, and of the oracle beside it."""

from __future__ import annotations

from math import ceil, floor

import numpy as np
import numpy.typing as npt
from PIL import Image

from giornata_prepost.images.geometry import Box, Size
from giornata_prepost.images.masks import MIN_ALPHA, Alpha
from giornata_prepost.images.pictures import Pixels


def paste(
    original: Pixels, alpha: Alpha, painted: Pixels, size: Size | None = None, crop: Box | None = None
) -> Pixels:
    """Composite the painted picture over the original with the effective alpha.

    Where alpha is 0 the output equals the original, its alpha channel included; where it is 1, the painted
    picture, opaque. Between, Porter and Duff's *over*, so that colours hidden under transparent pixels do
    not shine through.

    The output has the original's channels, and its size unless `size` says otherwise: then original and alpha are
    resized first. The painted picture, (h, w, 3) at the model's size, shows `crop` of the original, or all of it; alpha
    is 0 elsewhere. It is resized to the output (Lanczos).
    """
    own = Size.of(original)
    size = size or own
    output = resize(original, size).copy()
    place, painted = place_painted(painted, crop or Box(0, 0, *own), own, size)
    alpha = resize_alpha(alpha, size)[place.window]
    below = output[place.window]
    full = alpha >= 1
    np.copyto(below[..., :3], painted, where=full[..., None])
    below[..., 3:][full] = 255
    feather = (alpha > 0) & ~full
    below[feather] = _over(below[feather], alpha[feather][:, None], painted[feather])
    return output


def place_painted(painted: Pixels, crop: Box, original: Size, output: Size) -> tuple[Box, Pixels]:
    """The box of the output that the painted picture, which shows `crop` of the original, covers, and its pixels there.

    Where the output has another size than the original, the crop's edges fall between pixels of the output, and
    resized alpha reaches a little beyond them: the box is a margin larger, and the painted picture's border goes on
    there. Positions stay exact.
    """
    if output == original:
        return crop, resize(painted, crop.size)
    if crop == (0, 0, *original):
        return Box(0, 0, *output), resize(painted, output)
    left, width, beyond_x, (low_x, high_x) = _span(
        crop.left, crop.width, painted.shape[1], original.width, output.width
    )
    top, height, beyond_y, (low_y, high_y) = _span(
        crop.top, crop.height, painted.shape[0], original.height, output.height
    )
    place = Box(left, top, width, height)
    extended = np.pad(painted, ((beyond_y, beyond_y), (beyond_x, beyond_x), (0, 0)), mode="edge")
    source = (low_x, low_y, high_x, high_y)
    resized = Image.fromarray(extended).resize(place.size, Image.Resampling.LANCZOS, box=source)
    return place, np.asarray(resized)


def _span(
    first: int, length: int, painted: int, original: int, output: int
) -> tuple[int, int, int, tuple[float, float]]:
    """One axis: start and length in the output, pixels that extend the painted picture at both ends, and its span."""
    scale = output / original
    margin = ceil(max(1.0, scale))  # the reach of the linear filter of `resize_alpha`
    start = max(0, floor(first * scale) - margin)
    end = min(output, ceil((first + length) * scale) + margin)
    low, high = ((edge / scale - first) * painted / length for edge in (start, end))
    beyond = ceil(max(0.0, -low, high - painted))
    return start, end - start, beyond, (low + beyond, min(high + beyond, painted + 2 * beyond))


def resize(pixels: Pixels, size: Size) -> Pixels:
    """Lanczos; colours are weighted with their alpha. The pixels themselves where the size is theirs."""
    if Size.of(pixels) == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def resize_alpha(alpha: Alpha, size: Size) -> Alpha:
    """Linear interpolation, averaging where it shrinks; what cannot change an 8-bit value is 0."""
    if Size.of(alpha) == size:
        return alpha
    resized = np.asarray(Image.fromarray(alpha).resize(size, Image.Resampling.BILINEAR))
    return np.where(resized < MIN_ALPHA, np.float32(0), np.minimum(resized, np.float32(1)))


def _over(below: Pixels, share: npt.NDArray[np.float32], above: Pixels) -> Pixels:
    """Opaque colours `above` (n, 3) with weight `share` (n, 1) over `below` (n, 3 or 4) in straight alpha."""
    colour = below[:, :3].astype(np.float32)
    if below.shape[1] == 3:
        return _rounded(colour + share * (above - colour))
    under = (1 - share) * below[:, 3:].astype(np.float32) / np.float32(255)
    opacity = share + under
    mixed = (share * above.astype(np.float32) + under * colour) / opacity
    return np.hstack([_rounded(mixed), _rounded(opacity * np.float32(255))])


def _rounded(values: npt.NDArray[np.floating]) -> Pixels:
    rounded: Pixels = np.rint(values).clip(0, 255).astype(np.uint8)
    return rounded
