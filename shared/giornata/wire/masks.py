"""Masks from words: what serves them, and the question to prepost that makes one."""

from __future__ import annotations

from typing import Final

from giornata.wire.jobs import BlobRef, Box
from giornata.wire.mask_words import MAX_REGIONS
from giornata.wire.values import Wire

MASK: Final = "mask"
"""Name of the mask that shows all regions together, where masks are kept."""


class MaskCard(Wire):
    """A model that makes masks from words."""

    name: str
    """As its operator calls it: a folder's name, or a hub id."""
    threshold: float
    """The least score of a region, where a request names none."""


def region_name(index: int) -> str:
    """The name of one region's own mask, where masks are kept."""
    return f"region_{index}"


class MaskRequest(Wire):
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


class FoundRegion(Wire):
    """One thing in the picture."""

    score: float
    """How sure the model is, in 0 to 1."""
    box: Box
    """The smallest that holds it, in pixels of the upright picture."""
    area: int
    """Its pixels."""
    mask: BlobRef | None = None
    """PNG of the upright picture's size, white on black; None unless :attr:`MaskRequest.each` asks for it."""


class MaskReply(Wire):
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
