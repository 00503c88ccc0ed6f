"""The empty prompt's conditioning, which every template run reads: encoded once and kept for all jobs.

Where the text encoder sees the picture, it is encoded once for each picture.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import Final

from giornata import tensors
from giornata.blobs import BlobStore
from giornata.wire.jobs import BlobRef
from giornata_prepost.families.protocol import ImageModel, SeenPictures
from giornata_prepost.images.geometry import Size
from giornata_prepost.work import CallPriority, ModelThread

TTL_S: Final = 24 * 3600
"""How long it is kept in the blob store; it is written again once it is gone."""
PICTURE_TTL_S: Final = 3600
"""As :data:`TTL_S`, of one picture's: each job writes it again, for its own time."""
SIZES: Final = 16
"""Picture sizes, or pictures, of which an instance remembers it, where the family's text varies with them."""


class EmptyPromptCache:
    """One instance's; its claim checks are those of `instance`."""

    def __init__(self, model: ImageModel, thread: ModelThread, blobs: BlobStore, instance: str) -> None:
        self._model, self._thread, self._blobs = model, thread, blobs
        self._key = f"shared-{instance}-empty-text"
        self._packed: OrderedDict[str, bytes] = OrderedDict()
        self._refs: dict[str, BlobRef] = {}

    async def keep(self, tenant: str, size: Size, seen: SeenPictures = ()) -> BlobRef:
        """A claim check of it, for pictures of `size`, or of `tenant`, for those that the text encoder has `seen`."""
        key = self._key + self._variant(size, seen)
        packed = await self._encoded(key, size, seen)
        if seen:
            return await self._blobs.put(f"{tenant}/{key}", packed, PICTURE_TTL_S)
        ref = self._refs.get(key)
        if ref is None or not await self._blobs.has(ref):
            ref = self._refs[key] = await self._blobs.put(key, packed, TTL_S)
        return ref

    def _variant(self, size: Size, seen: SeenPictures) -> str:
        """What the text varies with, as the end of a key."""
        if seen:
            pictures = hashlib.sha256()
            for picture in seen:
                pictures.update(str(picture.shape).encode() + picture.tobytes())
            return f"-{size}-{pictures.hexdigest()}"
        return f"-{size}" if self._model.text_varies_with_size else ""

    async def _encoded(self, key: str, size: Size, seen: SeenPictures) -> bytes:
        if key not in self._packed:
            text, _ = await self._thread.timed(CallPriority.BEGIN, self._model.encode_text, "", size, seen)
            self._packed[key] = await asyncio.to_thread(tensors.pack, text)
        packed = self._packed[key]
        self._packed.move_to_end(key)
        while len(self._packed) > SIZES:
            forgotten, _ = self._packed.popitem(last=False)
            self._refs.pop(forgotten, None)
        return packed
