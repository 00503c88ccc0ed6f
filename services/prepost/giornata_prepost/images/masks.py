"""From a mask to the pixels that are edited, how strongly, and the tokens that this touches; and the painted paste.

The order: mask → edited region (binary, at the image's size) → grown → feathered = *effective alpha*
→ every model pixel touched by it = the model's mask → every token touched by that = the compute set.
"""

from __future__ import annotations

import zlib
from math import ceil, floor, log, sqrt
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy
from PIL import Image
from safetensors.numpy import load, save

from giornata.wire.errors import MaskEmpty, MaskRejected, MaskSizeMismatch
from giornata.wire.requests import MaskMode
from giornata.wire.values import CellMap
from giornata_prepost.images.pictures import Box, Pixels, Size, same_aspect

Region: TypeAlias = npt.NDArray[np.bool_]
"""(height, width): True where something is edited."""
Alpha: TypeAlias = npt.NDArray[np.float32]
"""(height, width) in 0..1: share of the painted picture in the output."""

HALO_PX: Final = 16
"""Pixels a side of the cells that a halo counts: most models' tokens."""
MIN_ALPHA: Final = 1 / 512
"""Below this the feather cannot change an 8-bit value; it is cut to 0, so that its support is bounded."""
EDGE_PX: Final = 4
"""Pixels of a mask's edge that are mixed where no feather is asked for."""
LEVELS: Final = 4095
"""Steps of an effective alpha."""
REACH_PER_SIGMA: Final = sqrt(2 * log(1 / MIN_ALPHA))
"""Distance in sigmas (3.53) at which the feather falls to :data:`MIN_ALPHA`."""


def edited_region(image: Pixels, mask: Pixels | None, mode: MaskMode) -> Region:
    """The region that the caller marked, at the image's size.

    With a mask, an alpha below 128 means edit in mode `alpha`, a luma (Rec. 601) of at least 128 in `white`,
    below 128 in `black`; transparent parts of a mask count as not marked in the latter two. `auto` is
    `alpha` where the mask has any such pixel, else `white`. A mask of another size and the same aspect
    ratio is resized to the nearest pixel.

    Without a mask, modes `auto` and `alpha` read the image's own transparency; `auto` edits the whole of an
    opaque image.

    Raises:
        MaskRejected: the mode needs a mask or an alpha channel that is not there.
        MaskSizeMismatch: the aspect ratio is not the image's.
        MaskEmpty: nothing is marked.
    """
    size = Size.of(image)
    if mask is None:
        region = _own_transparency(image, mode)
    elif same_aspect(size, Size.of(mask)):
        region = nearest(_marked(mask, mode), size)
    else:
        raise MaskSizeMismatch(
            "The mask must have the image's aspect ratio.",
            field="mask",
            received=Size.of(mask),
            accepted=f"{size}, best of the same size",
        )
    if not region.any():
        raise MaskEmpty(
            field="image" if mask is None else "mask",
            received=f"mask_mode {mode}, no pixel marked",
            accepted=_MEANING[mode],
        )
    return region


def effective_alpha(region: Region, grow_px: int, blur_px: float | None) -> Alpha:
    """1 on the region grown by a disc of radius `grow_px`, then a Gaussian (sigma `blur_px`) of the distance to it.

    The feather goes outward only. Blurring the mask itself would leave half of the old picture at the very
    edge that the caller painted over; this profile leaves 1 with a slope of 0 and so shows no seam.

    None as `blur_px` changes nothing outside of the grown region: its last pixels are mixed, see :func:`soft_edge`.
    """
    if blur_px is None:
        return soft_edge(_spread(region, grow_px, 0.0) > 0)
    return _in_levels(_spread(region, grow_px, blur_px))


def _in_levels(alpha: Alpha) -> Alpha:
    """`alpha` in steps of 1 / :data:`LEVELS`, none of which an 8-bit picture shows; what is above 0 stays above 0."""
    levels: Alpha = np.ceil(alpha * np.float32(LEVELS)) / np.float32(LEVELS)
    return levels


def _spread(region: Region, grow_px: int, blur_px: float) -> Alpha:
    reach = grow_px + REACH_PER_SIGMA * blur_px
    if reach < 1 or not region.any():
        return region.astype(np.float32)
    alpha = np.zeros(region.shape, np.float32)
    window = bounds(region, ceil(reach)).window
    beyond = scipy.ndimage.distance_transform_edt(~region[window]).astype(np.float32) - np.float32(grow_px)
    if blur_px > 0:
        np.maximum(beyond, 0, out=beyond)
        profile = np.exp(-0.5 * (beyond / np.float32(max(blur_px, 1e-3))) ** 2)
        alpha[window] = np.where(profile < MIN_ALPHA, 0, profile)
    else:
        alpha[window] = beyond <= 0
    return alpha


def soft_edge(region: Region) -> Alpha:
    """0 outside of a region, and rising to 1 over its own last pixels: :data:`EDGE_PX`, fewer where it is narrow.

    Each pixel belongs to the largest square that lies in the region and holds it. Of a square's width at most a quarter
    is mixed on either side, so that narrow parts are painted, too. The picture's border is no edge.
    """
    alpha = region.astype(np.float32)
    if region.all() or not region.any():
        return alpha
    window = bounds(region, 1).window
    depth = scipy.ndimage.distance_transform_cdt(region[window], "chessboard")
    mixed = np.zeros(depth.shape, np.uint8)
    for px in range(1, EDGE_PX + 1):
        side = 4 * px + 1  # of squares whose middles lie 2 px + 1 deep
        mixed[scipy.ndimage.maximum_filter((depth > 2 * px).view(np.uint8), side, mode="constant") > 0] = px
    share = np.minimum(depth / (mixed + np.float32(1)), 1)
    alpha[window] = share * share * (3 - 2 * share)  # flat at both ends, so that neither shows
    return _in_levels(alpha)


def model_mask(alpha: Alpha, size: Size, grain: int = 1) -> Region:
    """Every pixel of the model's picture with an alpha above 0 in its area, then whole cells of `grain` pixels.

    The family tells edited from kept in cells of `grain` pixels a side, which divides the picture's sides.
    FluxInpaintPipeline samples its mask at one pixel per latent; without whole cells, a painted strip narrower than a
    latent would be lost.
    """
    touched = np.ascontiguousarray(_touched(_touched(alpha > 0, size.height).T, size.width).T)
    if grain == 1:
        return touched
    return pool_cells(touched, grain).repeat(grain, axis=0).repeat(grain, axis=1)


def compute_set(mask: Region, halo: int, token_px: int) -> CellMap | None:
    """The tokens that an edit computes where it reuses the others; None where reuse gains nothing.

    These are the tokens of `token_px` pixels a side that `mask`, the model's, touches when it is grown by `halo` cells,
    diagonally too. A cell is a token; of tokens that are made of whole cells of :data:`HALO_PX` pixels, such a cell.
    FlashPS has no halo; it costs little, and most of what reuse loses is lost there.
    """
    cell_px = token_px if token_px % HALO_PX else HALO_PX
    near = scipy.ndimage.maximum_filter(pool_cells(mask, cell_px), 2 * halo + 1, mode="constant")
    grown = pool_cells(near, token_px // cell_px)
    if grown.all() or not grown.any():
        return None
    height, width = grown.shape
    return CellMap(height=height, width=width, bits=np.packbits(grown).tobytes())


def pool_cells(mask: Region, cell_px: int) -> Region:
    """Max-pooling: (height / cell_px, width / cell_px) bool."""
    height, width = mask.shape
    pooled = mask.reshape(height // cell_px, cell_px, width // cell_px, cell_px)
    hit: Region = np.logical_or.reduce(pooled, axis=(1, 3))
    return hit


def nearest(region: Region, size: Size) -> Region:
    """Resized to the nearest pixel (centres aligned)."""
    if Size.of(region) == size:
        return region
    height, width = region.shape
    rows = (2 * np.arange(size.height) + 1) * height // (2 * size.height)
    columns = (2 * np.arange(size.width) + 1) * width // (2 * size.width)
    resized: Region = region[rows[:, None], columns]
    return resized


def bounds(region: Region, margin: int) -> Box:
    """The smallest box that holds a region, which is not empty, and `margin` pixels around it within the picture."""
    first, last = [], []
    for axis, length in ((0, region.shape[1]), (1, region.shape[0])):
        hits = np.flatnonzero(region.any(axis=axis))
        first.append(max(0, int(hits[0]) - margin))
        last.append(min(length, int(hits[-1]) + margin + 1))
    return Box(first[0], first[1], last[0] - first[0], last[1] - first[1])


def pack_alpha(alpha: Alpha) -> bytes:
    """An effective alpha without loss, as a blob: the part that is above 0, as compressed differences of its levels.

    The inspection computes it once; the finishing of every row reads it. The widest feather of a picture of
    40 megapixels takes 2 MB so, where its values in float32 took 17, compressed: many jobs keep theirs at a time.
    """
    box = bounds(alpha > 0, 0) if alpha.any() else Box(0, 0, 0, 0)
    place = np.array([*alpha.shape, *box], np.int64)
    levels = np.rint(alpha[box.window] * np.float32(LEVELS)).astype(np.uint16)
    steps = np.diff(levels, axis=1, prepend=np.uint16(0))
    return zlib.compress(save({"place": place, "steps": np.ascontiguousarray(steps)}), level=1)


def unpack_alpha(data: bytes) -> Alpha:
    """Return what :func:`pack_alpha` was given."""
    tensors = load(zlib.decompress(data))
    height, width, *box = tensors["place"].tolist()
    alpha = np.zeros((height, width), np.float32)
    levels = np.cumsum(tensors["steps"], axis=1, dtype=np.uint16)
    alpha[Box(*box).window] = levels / np.float32(LEVELS)
    return alpha


_MEANING: Final = {
    MaskMode.AUTO: "a mask with transparent or, where it has none, white pixels",
    MaskMode.ALPHA: "pixels of an alpha below 128",
    MaskMode.WHITE: "pixels of a luma of at least 128",
    MaskMode.BLACK: "pixels of a luma below 128",
}


def _own_transparency(image: Pixels, mode: MaskMode) -> Region:
    if mode in (MaskMode.WHITE, MaskMode.BLACK):
        raise MaskRejected(
            f"mask_mode {mode} needs a mask.",
            field="mask",
            received="no mask",
            accepted="a mask, or mask_mode auto",
        )
    if _is_transparent(image):
        return image[..., 3] < 128
    if mode is MaskMode.ALPHA:
        raise MaskRejected(
            "mask_mode alpha needs a mask, or an image with transparent pixels.",
            field="mask",
            received="no mask and an opaque image",
            accepted="a mask, or mask_mode auto to edit the whole image",
        )
    return np.ones(image.shape[:2], np.bool_)


def _marked(mask: Pixels, mode: MaskMode) -> Region:
    if mode is MaskMode.ALPHA and mask.shape[2] == 3:
        raise MaskRejected(
            "mask_mode alpha needs a mask with an alpha channel.",
            field="mask",
            received="a mask without an alpha channel",
            accepted="PNG or WebP with transparency, or mask_mode white or black",
        )
    if mode is MaskMode.ALPHA or (mode is MaskMode.AUTO and _is_transparent(mask)):
        return mask[..., 3] < 128
    white = np.asarray(Image.fromarray(mask).convert("L")) >= 128
    if mode is MaskMode.BLACK:
        white = ~white
    return white & (mask[..., 3] >= 128) if mask.shape[2] == 4 else white


def _is_transparent(pixels: Pixels) -> bool:
    return pixels.shape[2] == 4 and bool((pixels[..., 3] < 128).any())


def _touched(region: Region, length: int) -> Region:
    """Reduce axis 0 to `length` cells; a cell is True where its span, exactly computed, meets a True row."""
    extent = region.shape[0]
    if extent == length:
        return region
    before = np.zeros((extent + 1, region.shape[1]), np.int32)
    np.cumsum(region, axis=0, out=before[1:])
    index = np.arange(length)
    start, stop = index * extent // length, -(-(index + 1) * extent // length)
    touched: Region = before[stop] > before[start]
    return touched


# The painted picture into the original: the compositing of every edit.


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
