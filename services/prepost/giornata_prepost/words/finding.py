"""The question for a mask: a picture through the pool, a segmenter in the model's thread, masks to the store."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from giornata.blobs import BlobStore
from giornata.seeing.spans import span
from giornata.wire.masks import MASK, FoundRegion, MaskReply, MaskRequest, region_name
from giornata_prepost.config import PrepostConfig
from giornata_prepost.images.regions import Shown, Wanted, finished, looked_at
from giornata_prepost.words.segmenter import SEEN_PIXELS, Segmenter
from giornata_prepost.work import ImagePool, ModelThread, Precedence


@dataclass(frozen=True)
class Finding:
    """One instance's, with one segmenter."""

    config: PrepostConfig
    blobs: BlobStore
    pool: ImagePool
    thread: ModelThread
    segmenter: Segmenter
    held: asyncio.Semaphore
    """Bounds the pictures in memory."""

    async def answer(self, request: MaskRequest) -> MaskReply:
        """What the words name in the picture, and where its masks are kept."""
        card = self.segmenter.card
        threshold = card.threshold if request.threshold is None else request.threshold
        limit_s = self.config.image_timeout_s
        wanted = Wanted(threshold, request.max_regions, request.each)
        async with self.held:
            image = await self.blobs.get(request.image)
            (picture, size), _ = await self.pool.timed(
                looked_at, image, self.config.max_pixels, SEEN_PIXELS, limit_s=limit_s
            )
            with span("segment") as segmenting:
                seen, compute_ms = await self.thread.timed(
                    Precedence.BEGIN, self.segmenter.seen, picture, request.prompt, wanted
                )
                segmenting.note(compute_ms=compute_ms)
            masks, _ = await self.pool.timed(finished, seen, size, wanted, request.prompt, limit_s=limit_s)
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

    async def _region(self, request: MaskRequest, index: int, found: Shown) -> FoundRegion:
        mask = None
        if found.png is not None:
            mask = await self.blobs.put(request.folder + region_name(index), found.png, request.ttl_s)
        return FoundRegion(score=found.score, box=(*found.box,), area=found.area, mask=mask)
