"""Rows whose latents are kept, and the latents that go and come with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from giornata.approximate.nearest import Embedding
from giornata.wire.jobs import BlobRef
from giornata.wire.prompts import PromptEntry


class Hit(NamedTuple):
    """A latent that a row may begin with."""

    entry: str
    """Its entry's id."""
    step: int
    """Steps that the row saves."""
    cosine: float
    latents: BlobRef


class Gone(NamedTuple):
    """What is kept no more."""

    latents: tuple[BlobRef, ...] = ()
    changed: tuple[PromptEntry, ...] = ()
    """Entries that have other latents left."""
    ended: tuple[str, ...] = ()
    """Ids of entries that have none."""


def embedding_of(told: bytes) -> Embedding | None:
    """An embedding as it travels, of length 1; None where it is not one.

    See :attr:`giornata.wire.jobs.Encoding.prompt_embedding`.
    One of zeros, or of values that are not finite, has no direction.
    """
    if not told or len(told) % 2:
        return None
    numbers: npt.NDArray[np.float32] = np.frombuffer(told, "<f2").astype(np.float32)
    length = float(np.linalg.norm(numbers))
    return numbers / np.float32(length) if np.isfinite(length) and length > 0 else None


def without(entry: PromptEntry, steps: Iterable[int]) -> PromptEntry:
    """An entry with its latents of these steps gone."""
    gone = set(steps)
    kept = tuple(latent for latent in entry.kept if latent.step not in gone)
    return entry.model_copy(update={"kept": kept})
