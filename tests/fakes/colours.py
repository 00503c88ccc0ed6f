"""A segmenter that finds colours by their names, and a prepost that makes masks with it and does nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import numpy as np

from giornata.blobs import BlobStore
from giornata.bus.bus import Bus, Endpoint
from giornata.wire import subjects
from giornata.wire.messages import MaskCard, MaskReply, MaskRequest
from giornata_prepost.config import PrepostConfig
from giornata_prepost.images.pictures import Pixels
from giornata_prepost.segmentation import HeatMap, RegionCriteria, SegmentationHandler
from giornata_prepost.worker_pools import CallPriority
from tests.configs import configured

COLOURS: Final[Mapping[str, tuple[int, int, int]]] = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
}
CARD: Final = MaskCard(name="colours", threshold=0.5)


class ColourSegmenter:
    """A segmenter that needs no weights: pixels are as likely as they are near to a colour that the words name."""

    card = CARD

    def seen(self, picture: Pixels, words: str, wanted: RegionCriteria) -> HeatMap:
        named = [rgb for name, rgb in COLOURS.items() if name in words] or [(600, 600, 600)]
        far = [np.abs(picture.astype(np.float32) - np.array(rgb, np.float32)).max(axis=2) for rgb in named]
        return HeatMap(np.clip(1 - np.min(far, axis=0) / 255, 0, 1).astype(np.float32))


class WorkInPlace:
    """Stands for prepost's processes and its thread: small pictures need neither."""

    async def timed(self, *work: Any, limit_s: float = 0.0) -> tuple[Any, float]:
        """Call a function with arguments; before them a thread is told its turn, and after them a process its limit."""
        del limit_s
        function, *arguments = work[1:] if isinstance(work[0], CallPriority) else work
        return function(*arguments), 0.0


class ColourMasks:
    """Prepost's own way from a picture to its masks, behind its own subject; it notes what it is asked."""

    def __init__(self, bus: Bus, blobs: BlobStore, model: str) -> None:
        self._bus, self._blobs = bus, blobs
        self._subject = subjects.prepost("mask", model)
        self.asked: list[MaskRequest] = []
        self.hold: asyncio.Event | None = None
        """Answers wait for it."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        config, here = configured(PrepostConfig, model="unused"), cast("Any", WorkInPlace())
        finding = SegmentationHandler(
            config, self._blobs, here, here, ColourSegmenter(), asyncio.Semaphore(2)
        )

        async def answer(request: MaskRequest) -> MaskReply:
            self.asked.append(request)
            if self.hold is not None:
                await self.hold.wait()
            return await finding.answer(request)

        endpoint = Endpoint(self._subject, MaskRequest, answer)
        async with self._bus.serve("prepost", endpoint, instance="colours"):
            yield
