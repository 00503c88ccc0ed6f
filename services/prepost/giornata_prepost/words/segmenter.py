"""What finds a thing by its name."""

from __future__ import annotations

from math import isfinite
from typing import Any, Final, Protocol

import numpy as np

from giornata.wire.errors import Failed, InvalidField
from giornata.wire.masks import MaskCard
from giornata_prepost.images.pictures import Pixels
from giornata_prepost.images.regions import Candidate, Seen, Wanted, best_score

SEEN_PIXELS: Final = 2 << 20
"""A picture enters a segmenter with at most so many; all known ones scale it down further."""
UNNAMED: Final = 1 << 20
"""A tokenizer's `model_max_length` above this says that its checkpoint names none."""


class Segmenter(Protocol):
    """Finds what words name in a picture. Used from one thread."""

    card: MaskCard

    def seen(self, picture: Pixels, words: str, wanted: Wanted) -> Seen:
        """What it sees of `words` in a picture (height, width, 3); `wanted` spares work for what is not taken.

        InvalidField where the words have more tokens than it reads.
        """
        ...


class Refiner(Protocol):
    """Draws outlines in boxes. Used from one thread."""

    def outlined(self, picture: Pixels, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """The candidates with the heat of what is in their boxes."""
        ...


def rehearse_segmenter(segmenter: Segmenter) -> None:
    """Look for something in an empty picture, so that no request waits for kernels to be loaded.

    Failed where what is seen is not finite.
    """
    seen = segmenter.seen(np.zeros((64, 64, 3), np.uint8), "a", Wanted(segmenter.card.threshold, 1))
    if not isfinite(best_score(seen)):
        raise Failed("The mask model computes values that are not finite.", received=segmenter.card.name)


def checked(words: str, tokenizer: Any, positions: int) -> str:
    """`words` if they have no more tokens than the model has `positions` for; InvalidField otherwise."""
    named: int = tokenizer.model_max_length
    most = min(positions, named) if named < UNNAMED else positions
    count = len(tokenizer(words).input_ids)
    if count > most:
        raise InvalidField(
            "The words are too long for the segmenter.",
            field="mask_prompt",
            received=f"{count} tokens",
            accepted=f"at most {most}",
        )
    return words
