"""Masks from words: what serves them, what applications ask for, and the question to prepost that makes one."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from giornata.wire.jobs import BlobRef, Box
from giornata.wire.requests import MAX_REGIONS, MaskWords, ModelName, SegmentationFields
from giornata.wire.values import WireModel

MASK: Final = "mask"
"""Name of the mask that shows all regions together, where masks are kept."""


class MaskCard(WireModel):
    """A model that makes masks from words."""

    name: str
    """As its operator calls it: a folder's name, or a hub id."""
    threshold: float
    """The least score of a region, where a request names none."""


def region_name(index: int) -> str:
    """The name of one region's own mask, where masks are kept."""
    return f"region_{index}"


def _of_mask(name: str) -> str | None:
    """The description of a field that edits have too."""
    told = SegmentationFields.model_fields[name].description or ""
    return told.replace("`mask_prompt`", "`prompt`")


class MaskParameters(WireModel):
    """The parameters of a request for a mask alone."""

    prompt: MaskWords = Field(description='What the mask shows, in words: "the left shoe".')
    mask_threshold: float | None = Field(None, gt=0, le=1, description=_of_mask("mask_threshold"))
    max_regions: int | None = Field(None, ge=1, le=MAX_REGIONS, description=_of_mask("max_regions"))
    model: ModelName | None = Field(
        None,
        description="Name of a model beside which masks are made; default: any. Masks do not depend on what paints.",
    )

    def asked(self) -> SegmentationFields:
        """The same as fields of an edit."""
        return SegmentationFields(
            mask_prompt=self.prompt, mask_threshold=self.mask_threshold, max_regions=self.max_regions
        )


class MaskMessage(WireModel):
    """The message of the NATS door ``giornata.mask``: a mask from words by request-reply."""

    parameters: MaskParameters
    image: bytes | BlobRef
    remaining_ms: int = 60_000
    """Time allowed from this message to its answer."""
    api_key: str | None = None


class MaskPicture(WireModel):
    """A PNG of the upright picture's size, white on black: inline where it fits into the reply, else a claim check."""

    data: bytes | None = None
    ref: BlobRef | None = None


class MaskedRegion(MaskPicture):
    """One thing in the picture, with its own mask."""

    score: float
    """As of :class:`FoundRegion`, and so are the others."""
    box: Box
    area: int


class MaskMessageReply(MaskPicture):
    """The NATS door's answer to :class:`MaskMessage`: the mask of all regions together, and each region's own."""

    width: int
    """The upright picture's, in pixels."""
    height: int
    regions: tuple[MaskedRegion, ...]
    """The best score first; there is at least one."""
    threshold: float
    """The least score that a region had to have."""
    model: str
    """:attr:`MaskCard.name`."""


class MaskRequest(WireModel):
    """gateway → prepost: what do these words name in this picture? Answered by a :class:`MaskReply`.

    Asked again it keeps the same blobs again: the gateway names their place.
    """

    image: BlobRef
    """The file as it was sent."""
    prompt: str
    threshold: float | None = None
    """The least score; None for the model's own."""
    max_regions: int = MAX_REGIONS
    folder: str
    """Begins the keys of the masks, and ends in a slash."""
    ttl_s: int
    """How long they are kept."""
    each: bool = False
    """Whether every region's own mask is kept, too."""
    remaining_ms: int


class FoundRegion(WireModel):
    """One thing in the picture."""

    score: float
    """How sure the model is, in 0 to 1."""
    box: Box
    """The smallest that holds it, in pixels of the upright picture."""
    area: int
    """Its pixels."""
    mask: BlobRef | None = None
    """PNG of the upright picture's size, white on black; None unless :attr:`MaskRequest.each` asks for it."""


class MaskReply(WireModel):
    """prepost → gateway: what was found. There is at least one region: NothingFound is raised where there is none."""

    width: int
    """The upright picture's, in pixels."""
    height: int
    regions: tuple[FoundRegion, ...]
    """The best score first."""
    mask: BlobRef
    """All of them together: PNG of the upright picture's size, white on black."""
    threshold: float
    """The least score of a region."""
    model: str
    """:attr:`MaskCard.name`."""
    compute_ms: float
    """Time in the model's thread."""
