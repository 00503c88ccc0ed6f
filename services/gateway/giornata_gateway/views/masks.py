"""Masks from words as clients see them."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from giornata.wire.jobs import BlobRef, Box
from giornata.wire.masks import MaskedRegion, MaskMessageReply, MaskReply
from giornata_gateway.views.answers import View


class RegionView(View):
    """One thing in the picture."""

    score: float
    """How sure the mask model is, in 0 to 1."""
    box: Box
    """The smallest that holds it: left, top, width and height in pixels."""
    area: int
    """Its pixels."""
    b64_png: str
    """Its mask: PNG of the picture's size, white on black."""


class MaskAnswer(View):
    """Answer of ``POST /v1/masks``."""

    created: int
    model: str
    """What made the masks."""
    width: int
    """The picture's, in pixels, once it is upright."""
    height: int
    threshold: float
    """The least score that a region had to have."""
    regions: list[RegionView]
    """The surest first."""
    b64_png: str
    """The mask of all regions together, as an edit takes it."""


def mask_answer(reply: MaskReply, pngs: Mapping[str, bytes], created: int) -> MaskAnswer:
    """The answer; `pngs` are the masks by the keys of their blobs."""

    def text(key: str) -> str:
        return base64.b64encode(pngs[key]).decode()

    return MaskAnswer(
        created=created,
        model=reply.model,
        width=reply.width,
        height=reply.height,
        threshold=reply.threshold,
        regions=[
            RegionView(score=one.score, box=one.box, area=one.area, b64_png=text(one.mask.key))
            for one in reply.regions
            if one.mask is not None
        ],
        b64_png=text(reply.mask.key),
    )


def mask_made(reply: MaskReply, pngs: Mapping[str, bytes]) -> MaskMessageReply:
    """The answer over NATS; `pngs` are the masks that travel inside it, by the keys of their blobs."""

    def travelling(ref: BlobRef) -> tuple[bytes | None, BlobRef | None]:
        return (pngs[ref.key], None) if ref.key in pngs else (None, ref)

    regions = []
    for one in reply.regions:
        if one.mask is not None:
            data, ref = travelling(one.mask)
            regions.append(MaskedRegion(score=one.score, box=one.box, area=one.area, data=data, ref=ref))
    data, ref = travelling(reply.mask)
    return MaskMessageReply(
        width=reply.width,
        height=reply.height,
        regions=tuple(regions),
        threshold=reply.threshold,
        model=reply.model,
        data=data,
        ref=ref,
    )
