"""What an approximate prompt cache keeps of an edit, and where a row begins that it helps."""

from __future__ import annotations

from typing import Final

from giornata.wire.jobs import BlobRef
from giornata.wire.values import Recorded

SHARES: Final = (0.1, 0.2, 0.3, 0.4, 0.5)
"""After so much of its steps an edit's latent is kept."""

KEPT_S: Final = 24 * 3600
"""How long a kept latent lasts."""


class KeptLatent(Recorded):
    """A row's latent after some of its steps."""

    step: int
    """Steps computed."""
    latents: BlobRef
    """safetensors: `latents` (computed tokens, channels) float16, in the order of the row's compute set; of a row that
    computes all, of all tokens."""


class Beginning(Recorded):
    """Where a row begins that takes another edit's latent."""

    entry: str
    """Id of that edit's entry."""
    step: int
    """Steps that it need not make."""
    latents: BlobRef
    """As :attr:`KeptLatent.latents`."""
    cosine: float
    """Of both prompts' embeddings."""


class PromptEntry(Recorded):
    """One row of an earlier edit."""

    entry_id: str
    key: str
    """What has to be equal: see :func:`giornata.approximate.keys.prompt_key`."""
    tenant: str
    template: str | None = None
    """The registered template of its picture; entries go with it."""
    embedding: bytes
    """Of its prompt: float16, little endian, of length 1."""
    steps: int
    """Of the whole edit."""
    kept: tuple[KeptLatent, ...]
    created_s: int
    """By the clock of the day."""

    @property
    def size_bytes(self) -> int:
        """Of all latents."""
        return sum(one.latents.size_bytes for one in self.kept)


def kept_steps(steps: int) -> tuple[int, ...]:
    """After which steps the latent of an edit of so many is kept: each of :data:`SHARES`, neither none nor all."""
    found = {round(share * steps) for share in SHARES}
    return tuple(sorted(step for step in found if 0 < step < steps))
