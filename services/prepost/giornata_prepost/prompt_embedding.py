"""What prompts are compared by: CLIP's pooled embedding and the mean of the prompt's tokens, side by side. Pure.

The pooled embedding alone knows a prompt's subject and hardly its colour: of the shipped model, "a red star" and "a
blue star" are as alike by it as two ways to say one of them. The tokens that the network reads tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

NUMBERS: Final = 768
"""Longer embeddings are projected to so many numbers, as many as CLIP's own: cosines of 0.9 change by about 0.01."""


def embedding(parts: Sequence[Numbers]) -> bytes | None:
    """The embedding that `parts`, (numbers,) each, are of equal weight in: of length 1, float16, little-endian.

    None where one of them is zero or not finite: it has no direction.
    """
    lengths = [float(np.linalg.norm(part)) for part in parts]
    if not all(0 < length < np.inf for length in lengths):
        return None
    whole = np.concatenate([part / length for part, length in zip(parts, lengths, strict=True)])
    if len(whole) > NUMBERS:
        whole = whole @ _signs(len(whole))
    unit: npt.NDArray[np.float16] = (whole / np.linalg.norm(whole)).astype("<f2")
    return unit.tobytes()


@lru_cache(maxsize=1)
def _signs(length: int) -> npt.NDArray[np.int8]:
    """(length, NUMBERS) of 1 and -1, equal in every process and version: numpy keeps this generator's stream."""
    drawn = np.random.RandomState(0).randint(0, 2, (length, NUMBERS), np.int8)
    return (2 * drawn - 1).astype(np.int8)
