"""Masks from words: what finds a thing by its name, the regions of what it saw, and the question for a mask."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import isfinite
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import scipy
from PIL import Image

from giornata.blobs import BlobStore
from giornata.tracing import span
from giornata.wire.errors import Failed, NothingFound
from giornata.wire.messages import MASK, FoundRegion, MaskCard, MaskReply, MaskRequest, region_name
from giornata_prepost.config import PrepostConfig
from giornata_prepost.images.masks import Region, bounds, nearest, resize
from giornata_prepost.images.pictures import PNG_LEVEL, Box, Pixels, Size, decode, flatten, of_area
from giornata_prepost.worker_pools import CallPriority, ImagePool, ModelThread

Heat = npt.NDArray[np.float32]
"""(height, width) in 0..1: how likely each pixel of the picture, or each cell of a coarser grid, belongs to it."""

WORK_PIXELS: Final = 4 << 20
"""Regions are cut out in at most so many pixels, and resized for larger pictures: segmenters see far fewer."""
LEAST_SHARE: Final = 1 / 4096
"""Smaller parts of a picture are noise: 256 pixels of a picture of 1024 a side, which is one token of most models."""
SAME_IOU: Final = 0.7
"""Two boxes of a detector that overlap by more than this show one thing: DETR-like ones suppress nothing themselves."""
EVERYWHERE: Final = np.ones((3, 3), np.bool_)
"""Pieces that touch at a corner are one."""


class RegionCriteria(NamedTuple):
    """The criteria by which regions are taken."""

    threshold: float
    """The least score, above 0."""
    most: int
    """How many at most, the best ones."""
    each: bool = False
    """Whether every region gets a mask of its own, beside the one of all."""


class HeatMap(NamedTuple):
    """A segmenter's answer: one map of everything that the words name."""

    heat: Heat


class Detection(NamedTuple):
    """One thing that a detector has found."""

    score: float
    box: tuple[float, float, float, float]
    """Left, top, right and bottom as shares of the picture's sides; it may reach beyond the picture."""
    heat: Heat | None = None
    """Its outline; None: all of the box."""


Seen = HeatMap | tuple[Detection, ...]


@dataclass(frozen=True)
class ScoredRegion:
    """A region; it has at least one pixel."""

    score: float
    mask: Region
    """(height, width) of the picture, or of the smaller one in which regions are cut out."""


class SegmentedRegion(NamedTuple):
    """A finished region, in pixels of the upright picture."""

    score: float
    box: Box
    area: int
    png: bytes | None


class SegmentationMasks(NamedTuple):
    """The finished masks of a picture."""

    size: Size
    regions: tuple[SegmentedRegion, ...]
    """The best score first."""
    png: bytes
    """All of them together."""


def decode_for_segmenter(image: bytes, max_pixels: int, seen_pixels: int) -> tuple[Pixels, Size]:
    """The picture in an untrusted file as a segmenter sees it, and its size when it is upright.

    It is (height, width, 3), in front of white, and has at most `seen_pixels`.

    Raises:
        BadRequest: the leaves that :func:`~giornata_prepost.images.pictures.decode` names.
    """
    pixels = flatten(decode(image, max_pixels).pixels)
    size = Size.of(pixels)
    return np.ascontiguousarray(resize(pixels, _at_most(size, seen_pixels))), size


def suppress_overlaps(candidates: Sequence[Detection], wanted: RegionCriteria) -> tuple[Detection, ...]:
    """The candidates that are taken, the best first: of boxes that show one thing, the best (greedy suppression)."""
    taken: list[Detection] = []
    for candidate in sorted(candidates, key=lambda one: one.score, reverse=True):
        if candidate.score < wanted.threshold or len(taken) == wanted.most:
            break
        if all(box_iou(candidate.box, other.box) <= SAME_IOU for other in taken):
            taken.append(candidate)
    return tuple(taken)


def box_iou(one: Sequence[float], other: Sequence[float]) -> float:
    """Intersection over union of two boxes: left, top, right, bottom."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = ((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return width * height / (sum(areas) - width * height)


def connected_regions(seen: Seen, size: Size, wanted: RegionCriteria) -> list[ScoredRegion]:
    """The regions that are taken, the best score first, at `size`."""
    parts = _of_heat(seen.heat, size, wanted) if isinstance(seen, HeatMap) else _of_boxes(seen, size, wanted)
    least = max(1, int(LEAST_SHARE * size.pixels))
    large = [part for part in parts if np.count_nonzero(part.mask) >= least]
    return sorted(large, key=lambda part: part.score, reverse=True)[: wanted.most]


def best_score(seen: Seen) -> float:
    """The highest score of anything; 0 where there is nothing."""
    if isinstance(seen, HeatMap):
        return float(seen.heat.max(initial=0.0))
    return max((candidate.score for candidate in seen), default=0.0)


def region_masks(seen: Seen, size: Size, wanted: RegionCriteria, words: str) -> SegmentationMasks:
    """The masks of what a segmenter saw of `words` in a picture of this `size`.

    Raises:
        NothingFound: no region is left.
    """
    found = connected_regions(seen, _at_most(size, WORK_PIXELS), wanted)
    if not found:
        raise NothingFound(
            received=f"'{words}'; the best score is {best_score(seen):.3f}",
            accepted=f"words of what the picture shows: a score of at least {wanted.threshold:g} on one in "
            f"{round(1 / LEAST_SHARE)} of its pixels; a lower mask_threshold finds more",
        )
    together = np.logical_or.reduce([piece.mask for piece in found])
    shown = [_shown(piece, size, each=wanted.each) for piece in found]
    return SegmentationMasks(size, tuple(shown), png(nearest(together, size)))


def png(mask: Region) -> bytes:
    """A mask as a file of one bit a pixel, white where it is True."""
    target = BytesIO()
    Image.fromarray(mask).save(target, "PNG", compress_level=PNG_LEVEL)
    return target.getvalue()


def _shown(piece: ScoredRegion, size: Size, *, each: bool) -> SegmentedRegion:
    """At `size`; only the region's box is resized, by :func:`nearest`, since it is a small part of a large picture."""
    left, top, width, height = bounds(piece.mask, 0)
    top, rows = _pixels(top, height, piece.mask.shape[0], size.height)
    left, columns = _pixels(left, width, piece.mask.shape[1], size.width)
    box = Box(left, top, len(columns), len(rows))
    inside = piece.mask[rows[:, None], columns]
    whole = None
    if each:
        mask = np.zeros((size.height, size.width), np.bool_)
        mask[box.window] = inside
        whole = png(mask)
    return SegmentedRegion(piece.score, box, int(np.count_nonzero(inside)), whole)


def _pixels(first: int, length: int, cells: int, pixels: int) -> tuple[int, npt.NDArray[np.int64]]:
    """First pixel along an axis whose nearest cell is `first`, and the nearest cells of pixels from there on."""
    start, end = (-(-(2 * pixels * cell - cells) // (2 * cells)) for cell in (first, first + length))
    return start, (2 * np.arange(start, end) + 1) * cells // (2 * pixels)


def _of_heat(heat: Heat, size: Size, wanted: RegionCriteria) -> Iterator[ScoredRegion]:
    """Connected pieces; the score of each is its highest."""
    smooth = _resized(heat, size)
    labels, count = scipy.ndimage.label(smooth >= wanted.threshold, EVERYWHERE)
    numbers = np.arange(1, count + 1)
    peaks = np.atleast_1d(scipy.ndimage.maximum(smooth, labels, numbers)) if count else numbers
    areas = np.bincount(labels.ravel(), minlength=count + 1)[1:]
    least = LEAST_SHARE * size.pixels
    large = [number for number in numbers if areas[number - 1] >= least]
    best = sorted(large, key=lambda number: peaks[number - 1], reverse=True)[: wanted.most]
    return (ScoredRegion(float(peaks[number - 1]), labels == number) for number in best)


def _of_boxes(candidates: Sequence[Detection], size: Size, wanted: RegionCriteria) -> Iterator[ScoredRegion]:
    for score, box, heat in suppress_overlaps(candidates, wanted):
        window = _window(box, size)
        mask = np.zeros((size.height, size.width), np.bool_)
        # an outline says inside or outside, and how sure the detector is says whether it counts
        mask[window] = True if heat is None else _resized(heat, size)[window] >= 0.5
        yield ScoredRegion(score, mask)


def _window(box: Sequence[float], size: Size) -> tuple[slice, slice]:
    """Every pixel that the box touches."""
    left, top, right, bottom = box
    rows = slice(max(0, int(top * size.height)), max(0, int(np.ceil(bottom * size.height))))
    return rows, slice(max(0, int(left * size.width)), max(0, int(np.ceil(right * size.width))))


def _resized(heat: Heat, size: Size) -> Heat:
    if Size.of(heat) == size:
        return heat
    return np.asarray(Image.fromarray(heat).resize(size, Image.Resampling.BILINEAR))


def _at_most(size: Size, pixels: int) -> Size:
    if size.pixels <= pixels:
        return size
    width, height = of_area(size, pixels)
    return Size(max(1, width), max(1, height))


# The question for a mask.

SEEN_PIXELS: Final = 2 << 20
"""A picture enters a segmenter with at most so many; all known ones scale it down further."""


class Segmenter(Protocol):
    """Finds what words name in a picture. Used from one thread."""

    card: MaskCard

    def seen(self, picture: Pixels, words: str, wanted: RegionCriteria) -> Seen:
        """Return what it sees of `words` in a picture (height, width, 3); `wanted` spares work for what is not taken.

        InvalidField where the words have more tokens than it reads.
        """
        ...


def rehearse_segmenter(segmenter: Segmenter) -> None:
    """Look for something in an empty picture, so that no request waits for kernels to be loaded.

    Failed where what is seen is not finite.
    """
    seen = segmenter.seen(np.zeros((64, 64, 3), np.uint8), "a", RegionCriteria(segmenter.card.threshold, 1))
    if not isfinite(best_score(seen)):
        raise Failed("The mask model computes values that are not finite.", received=segmenter.card.name)


@dataclass(frozen=True)
class SegmentationHandler:
    """One instance's, with one segmenter."""

    config: PrepostConfig
    blobs: BlobStore
    pool: ImagePool
    thread: ModelThread
    segmenter: Segmenter
    held: asyncio.Semaphore
    """Bounds the pictures in memory."""

    async def answer(self, request: MaskRequest) -> MaskReply:
        """Return what the words name in the picture, and where its masks are kept."""
        card = self.segmenter.card
        threshold = card.threshold if request.threshold is None else request.threshold
        limit_s = self.config.image_timeout_s
        wanted = RegionCriteria(threshold, request.max_regions, request.each)
        async with self.held:
            image = await self.blobs.get(request.image)
            (picture, size), _ = await self.pool.timed(
                decode_for_segmenter, image, self.config.max_pixels, SEEN_PIXELS, limit_s=limit_s
            )
            with span("segment") as segmenting:
                seen, compute_ms = await self.thread.timed(
                    CallPriority.BEGIN, self.segmenter.seen, picture, request.prompt, wanted
                )
                segmenting.note(compute_ms=compute_ms)
            masks, _ = await self.pool.timed(
                region_masks, seen, size, wanted, request.prompt, limit_s=limit_s
            )
        regions = [await self._region(request, index, one) for index, one in enumerate(masks.regions)]
        return MaskReply(
            width=size.width,
            height=size.height,
            regions=tuple(regions),
            mask=await self.blobs.put(request.folder + MASK, masks.png, request.ttl_s),
            threshold=threshold,
            model=card.name,
            compute_ms=compute_ms,
        )

    async def _region(self, request: MaskRequest, index: int, found: SegmentedRegion) -> FoundRegion:
        mask = None
        if found.png is not None:
            mask = await self.blobs.put(request.folder + region_name(index), found.png, request.ttl_s)
        return FoundRegion(score=found.score, box=(*found.box,), area=found.area, mask=mask)
