"""The one place where benchmarks make engines, so that a change of what an engine takes is a change of this file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Final

from giornata.planning.operations import StepCosts, StepWork
from giornata.planning.plans import BatchPlanner, plan_batch
from giornata.scheduling.batch import BatchingMode, Capacity, RowKey
from giornata.wire.requests import EditParameters
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.config import DenoiserConfig, TextReusePolicy
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loading import Loader, device_for
from giornata_denoiser.engine.step_plan import CostFollower, ReuseOptions
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_denoiser.templates.runs import LEVELS

FORM: Final = DenoiserConfig.model_fields["template_form"].default
BITS: Final = DenoiserConfig.template_bits
CORRECTED: Final = DenoiserConfig.template_correction
KEEPS_PADDING: Final = DenoiserConfig.model_fields["reuse_text"].default is TextReusePolicy.PADDING
HALO: Final = EditParameters.model_fields["halo"].default


class Teacher(StrEnum):
    """Whose correction an edit takes."""

    ITSELF = "its own"
    """It computes its first step in full."""
    SEED = "another seed"
    """An earlier edit of the same picture, mask and prompt."""
    PROMPT = "another prompt"
    """An earlier edit of the same picture and mask."""


@dataclass(frozen=True)
class BenchSetting:
    """One way to reuse."""

    form: CacheForm = FORM
    bits: int = BITS
    levels: int = LEVELS
    """Recorded noise levels; 0 for the edit's own."""
    halo: int = HALO
    corrected: bool = CORRECTED
    """Whether what is taken is corrected by a step that is computed in full."""
    teacher: Teacher = Teacher.ITSELF
    renewed_every: int = 0
    """Without a template: steps from one that is computed in full to the next; 0 takes from a template."""
    keeps_padding: bool = KEEPS_PADDING
    """Whether most steps take their prompts' padding."""

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "form": str(self.form)}

    @property
    def correction_bits(self) -> int | None:
        """The bits of corrections as an engine takes them; None where rows are not corrected."""
        return self.bits if self.corrected else None


DEFAULT: Final = BenchSetting()
"""How transformers reuse by default."""


@dataclass(frozen=True)
class Known:
    """A cost model that was measured before and learns nothing more."""

    costs: StepCosts

    def observe_step(self, work: StepWork, step_ms: float) -> None:
        """Nobody learns from it, so that all systems plan with the same costs."""


ROWS = 8
"""Most rows of a step."""
TOKENS = 1 << 20
AHEAD_BYTES = DEVICE_BYTES = 4 << 30


@contextmanager
def engine_with(
    family: ModelFamily,
    *,
    rows: int = ROWS,
    joining: BatchingMode = BatchingMode.STEP,
    setting: BenchSetting = DEFAULT,
    model: CostFollower | None = None,
    planner: BatchPlanner = plan_batch,
    rate_bytes_s: float | None = None,
) -> Iterator[Engine]:
    """An engine that loads ahead, for as long as its context lasts.

    Args:
        family: that it serves.
        rows: most of a step.
        joining: when they may join.
        setting: how templates are taken from.
        model: what steps cost; None where nobody knows.
        planner: of the modes.
        rate_bytes_s: no load is faster; None for as fast as it goes.
    """
    with Loader(rate_bytes_s) as loader:
        options = ReuseOptions(
            loader,
            planner=planner,
            device=device_for(family.device, DEVICE_BYTES),
            correction_bits=setting.correction_bits,
            ahead_bytes=AHEAD_BYTES,
        )
        if model is not None:
            options = replace(options, model=model)
        capacity = Capacity(rows, TOKENS)
        yield Engine(family, capacity, time.perf_counter, joining=joining, reusing=options)


def advanced(engine: Engine, rows: Sequence[Row], steps: int) -> list[Row]:
    """`rows` after their next `steps`; they fit into one step, and are not done before."""
    engine.batch.submit(rows)
    for _ in range(steps):
        report = engine.step()
        if report is None or len(report.advanced) != len(rows):
            raise ValueError(f"not all of {len(rows)} rows made each of {steps} steps")
        known = {row.key: row for row in report.advanced}
    return [known[row.key] for row in rows]


def taught(engine: Engine, rows: Sequence[Row]) -> list[Row]:
    """`rows` from their beginning, with the corrections that their first steps teach; they fit into one step."""
    return [
        row.corrected(after.reuse.corrections)
        for row, after in zip(rows, advanced(engine, rows, 1), strict=True)
    ]


def drained(engine: Engine, rows: Sequence[Row]) -> list[Row]:
    """`rows` when all are done, in order; whoever fails raises."""
    engine.batch.submit(rows)
    done: dict[RowKey, Row] = {}
    while (report := engine.step()) is not None:
        if report.failed:
            raise report.failed[0].error
        done |= {row.key: row for row in report.advanced if row.done}
    return [done[row.key] for row in rows]
