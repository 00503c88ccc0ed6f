"""How many steps a similar prompt may save: a table per model, measured or the operator's. Pure."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Line(BaseModel):
    """From this cosine on, so much of the steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cosine: Annotated[float, Field(gt=0, le=1)]
    share: Annotated[float, Field(gt=0, le=0.5)]


class SkipTable(BaseModel):
    """Lines from the largest cosine to the least; shares do not grow."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_: Annotated[Literal[1], Field(alias="schema")]
    table: Annotated[tuple[Line, ...], Field(min_length=1, max_length=32)]

    @model_validator(mode="after")
    def _descends(self) -> Self:
        for before, after in zip(self.table, self.table[1:], strict=False):
            if after.cosine >= before.cosine or after.share > before.share:
                raise ValueError(
                    f"received {after.cosine:g}: {after.share:g} after {before.cosine:g}: {before.share:g}; "
                    "accepted are lesser cosines with shares that do not grow"
                )
        return self

    @property
    def least_cosine(self) -> float:
        """Below it nothing is taken."""
        return self.table[-1].cosine

    def share(self, cosine: float) -> float:
        """Of the steps that a prompt of this cosine may save; 0 below the least."""
        return next((line.share for line in self.table if cosine >= line.cosine), 0.0)
