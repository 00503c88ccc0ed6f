"""Masks from words: what finds a thing by its name, and the question for a mask."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import isfinite
from typing import Final, Protocol

import numpy as np

from giornata.blobs import BlobStore
from giornata.tracing import span
from giornata.wire.errors import Failed
from giornata.wire.messages import MASK, FoundRegion, MaskCard, MaskReply, MaskRequest, region_name
from giornata_prepost.config import PrepostConfig
from giornata_prepost.images.pictures import Pixels
from giornata_prepost.images.regions import (
    RegionCriteria,
    Seen,
    SegmentedRegion,
    best_score,
    decode_for_segmenter,
    region_masks,
)
from giornata_prepost.worker_pools import CallPriority, ImagePool, ModelThread

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
