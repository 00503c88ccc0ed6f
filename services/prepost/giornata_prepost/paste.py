"""The painted picture into the original: the compositing of every edit, and of the oracle beside it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

from giornata_prepost.geometry import Size
from giornata_prepost.masks import MIN_ALPHA, Alpha
from giornata_prepost.pictures import Pixels


def paste(original: Pixels, alpha: Alpha, painted: Pixels, size: Size | None = None) -> Pixels:
    """Composite the painted picture over the original with the effective alpha.

    Where alpha is 0 the output equals the original, its alpha channel included; where it is 1, the painted
    picture, opaque. Between, Porter and Duff's *over*, so that colours hidden under transparent pixels do
    not shine through.

    Args:
        original: (height, width, 3 or 4) uint8, upright.
        alpha: (height, width) float32, 0..1.
        painted: (h, w, 3) uint8, the model's picture; resized to the output (Lanczos).
        size: of the output; default the original's. With another size original and alpha are resized first.

    Returns:
        (size.height, size.width, channels of the original) uint8.
    """
    size = size or Size(original.shape[1], original.shape[0])
    output = resize(original, size).copy()
    alpha = resize_alpha(alpha, size)
    painted = resize(painted, size)
    full = alpha >= 1
    np.copyto(output[..., :3], painted, where=full[..., None])
    output[..., 3:][full] = 255
    feather = (alpha > 0) & ~full
    output[feather] = _over(output[feather], alpha[feather][:, None], painted[feather])
    return output


def resize(pixels: Pixels, size: Size) -> Pixels:
    """Lanczos; colours are weighted with their alpha. The pixels themselves where the size is theirs."""
    if (pixels.shape[1], pixels.shape[0]) == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def resize_alpha(alpha: Alpha, size: Size) -> Alpha:
    """Linear interpolation, averaging where it shrinks; what cannot change an 8-bit value is 0."""
    if (alpha.shape[1], alpha.shape[0]) == size:
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
