"""A mask from words that was made over NATS."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from giornata.wire.masks import MaskedRegion, MaskMessageReply, MaskPicture


class RegionMask(MaskedRegion):
    """One thing in the picture."""

    data: bytes


class MaskResult(MaskMessageReply):
    """The mask that some words name. `data` is the mask of all regions together, as an edit takes it."""

    data: bytes
    regions: tuple[RegionMask, ...]


async def fetch_masks(
    made: MaskMessageReply, picture_bytes: Callable[[MaskPicture], Awaitable[bytes]]
) -> MaskResult:
    """An answer with the files of all its masks, which `picture_bytes` gets."""
    regions = [dict(one) | {"data": await picture_bytes(one)} for one in made.regions]
    return MaskResult.model_validate(dict(made) | {"data": await picture_bytes(made), "regions": regions})
