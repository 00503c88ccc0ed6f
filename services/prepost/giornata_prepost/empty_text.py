"""The empty prompt's conditioning, which every template run reads: encoded once and kept for all jobs."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from giornata import tensors
from giornata.blobs import BlobStore
from giornata.wire.jobs import BlobRef
from giornata_prepost.families.protocol import ImageModel
from giornata_prepost.images.geometry import Size
from giornata_prepost.work import ModelThread, Precedence

TTL_S: Final = 24 * 3600
"""How long it is kept in the blob store; it is written again once it is gone."""
SIZES: Final = 16
"""Picture sizes of which an instance remembers it, where the family's text varies with the size."""


class EmptyText:
    """One instance's; its claim checks are those of `instance`."""

    def __init__(self, model: ImageModel, thread: ModelThread, blobs: BlobStore, instance: str) -> None:
        self._model, self._thread, self._blobs = model, thread, blobs
        self._key = f"shared/{instance}/empty-text"
        self._packed: OrderedDict[Size | None, bytes] = OrderedDict()
        self._refs: dict[Size | None, BlobRef] = {}

    async def keep(self, size: Size) -> BlobRef:
        """A claim check of it, for pictures of `size`."""
        which = size if self._model.text_varies_with_size else None
        if which not in self._packed:
            text, _ = await self._thread.timed(Precedence.BEGIN, self._model.encode_text, "", size)
            self._packed[which] = await asyncio.to_thread(tensors.pack, text)
        packed = self._packed[which]
        self._packed.move_to_end(which)
        ref = self._refs.get(which)
        if ref is None or not await self._blobs.has(ref):
            key = self._key if which is None else f"{self._key}-{which}"
            ref = self._refs[which] = await self._blobs.put(key, packed, TTL_S)
        while len(self._packed) > SIZES:
            forgotten, _ = self._packed.popitem(last=False)
            self._refs.pop(forgotten, None)
        return ref
