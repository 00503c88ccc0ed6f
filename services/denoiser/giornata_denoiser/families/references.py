"""Clean pictures whose tokens stand behind a row's: the picture that it edits, and the request's references. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Grid = tuple[int, int]
"""Height and width of a picture in tokens."""
REFERENCES = "references"
"""Name in a row's conditioning of its references' tokens, (tokens, channels), one picture behind the other."""


@dataclass(frozen=True)
class ReferencePolicy:
    """Which clean pictures a family's network looks at."""

    own: bool = True
    """Whether the picture that is edited is one of them, the first."""
    replaced: bool = False
    """Whether the request's references stand in its place."""

    def grids(self, grid: Grid, given: Sequence[Grid], *, generated: bool = False) -> tuple[Grid, ...]:
        """Grids looked at: `grid` unless left out, then `given` in order; a generation has those alone."""
        alone = generated or not self.own or (self.replaced and bool(given))
        return (*(() if alone else (grid,)), *given)

    def tokens(self, conditioning: Mapping[str, Tensor]) -> Tensor | None:
        """(tokens, channels) of the pictures of :meth:`grids`; None without any."""
        own, given = conditioning.get("image_latents"), conditioning.get(REFERENCES)
        if own is None or not self.own or (self.replaced and given is not None):
            own = None
        parts = [part for part in (own, given) if part is not None]
        return torch.cat(parts) if parts else None


NONE = ReferencePolicy(own=False)
"""For families that look at no other picture."""


def area(grids: Sequence[Grid]) -> int:
    """Tokens of pictures."""
    return sum(height * width for height, width in grids)
