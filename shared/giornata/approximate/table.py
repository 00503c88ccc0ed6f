"""With how many steps saved a prompt's likeness pays: a table per model.

A row that begins with the latent of an unlike prompt keeps what that one drew. How unlike a prompt may be for each step
saved, only pictures can tell: a table is profiled where adherence can be judged, or written by the operator. A model
without one has no hits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, RootModel, model_validator

from giornata.approximate.steps import SHARES


class Threshold(BaseModel):
    """From a cosine on, a share of the steps may be saved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cosine: float = Field(gt=0, le=1)
    """The least cosine of the two prompts' embeddings."""
    share: float = Field(gt=0, le=max(SHARES))
    """The largest share of the steps that may be saved."""


class Table(BaseModel):
    """The thresholds of one checkpoint: more alike prompts save more steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    thresholds: tuple[Threshold, ...]
    """By falling cosine, and falling share."""
    told: str = ""
    """Where the numbers come from, for people."""

    @model_validator(mode="after")
    def _falls(self) -> Self:
        pairs = [(each.cosine, each.share) for each in self.thresholds]
        if any(one[0] <= other[0] or one[1] <= other[1] for one, other in itertools.pairwise(pairs)):
            raise ValueError("thresholds must fall in cosine and in share, each below the one before it")
        return self

    def share(self, cosine: float) -> float:
        """The largest share of the steps that prompts so alike may save; 0 for none."""
        return next((each.share for each in self.thresholds if cosine >= each.cosine), 0.0)

    @property
    def least_cosine(self) -> float:
        """Less alike prompts save nothing; infinite where none do."""
        return min((each.cosine for each in self.thresholds), default=math.inf)


class Tables(RootModel[Mapping[str, Table]]):
    """A file of tables, by the checkpoint's digest or its name; a digest goes before a name."""

    def of(self, name: str, digest: str) -> Table | None:
        """The table of a model; None if there is none."""
        return self.root.get(digest) or self.root.get(name)
