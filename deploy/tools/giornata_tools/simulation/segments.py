"""Equal steps of a simulated worker, and what telemetry tells of them. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from giornata.planning.costs import Shape, Work
from giornata.wire.values import Mode
from giornata.wire.workers import RowProgress, StepSample
from giornata_tools.simulation.steps import SimRow

EPSILON_S = 1e-9
"""A step that ends so soon after something came has ended before it."""


@dataclass(slots=True)
class Segment:
    """Equal steps that are being computed."""

    rows: tuple[SimRow, ...]
    began_s: float
    step_s: float
    steps: int
    number: int
    excess_ms: float = 0.0
    """Of each, by which loads make it longer."""

    def made(self, now: float) -> int:
        """Steps that have ended."""
        return min(self.steps, math.floor((now - self.began_s + EPSILON_S) / self.step_s))


def progress(row: SimRow, made: int) -> RowProgress:
    """As telemetry tells it, `made` steps into its segment."""
    step = row.shape.steps - row.left + made
    return row.told.model_copy(update={"step": step, "begun": row.begun or made > 0 or not row.first_ms})


def sample(segment: Segment) -> StepSample:
    """Of each of its steps, as telemetry tells it."""
    work = Work()
    for row in segment.rows:
        shape = Shape(row.shape.text, row.shape.image, row.shape.computed)
        work += shape.work(row.mode) * row.shape.sequences
    text = sum(row.shape.text * row.shape.sequences for row in segment.rows)
    return StepSample.model_construct(
        rows=len(segment.rows),
        sequences=round(work.sequences),
        image_tokens=round(work.tokens) - text,
        text_tokens=text,
        projected_tokens=round(work.projected),
        attention_pairs=round(work.pairs),
        assemble_ms=0.0,
        step_ms=segment.step_s * 1e3,
        reusing_ms=sum(row.step_ms for row in segment.rows if row.mode is not Mode.FULL),
        excess_ms=segment.excess_ms,
        waited_ms=segment.excess_ms,
    )
