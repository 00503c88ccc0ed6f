"""Steps that wait: which of them are refused, and which share the next forward."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import torch

from giornata.control.link.asking import ControlStepRequest
from giornata.control.running import RowStep
from giornata.packed.moving import moved
from giornata.wire.controlnets import StepRefusal
from giornata_controlnet.open_row import OpenRow

LEVEL_TOLERANCE: Final = 1e-5
"""Relative: noise levels travel as float64, and come from float32."""


@dataclass(eq=False)
class QueuedStep:
    """A step that was asked for, of a row that is open."""

    asked: ControlStepRequest
    row: OpenRow
    answered: set[int] = field(default_factory=set)
    """Its sums that were told."""

    @property
    def tokens(self) -> int:
        """Image tokens of its forwards: of each sequence and ControlNet."""
        return self.row.sequences * self.row.tokens * len(self.row.acting(self.asked.step))

    @property
    def work(self) -> float:
        """Multiplications of all ControlNets."""
        return self.row.work(self.asked.step)

    def of(self, device: torch.device, dtype: torch.dtype) -> RowStep:
        """The step as it is computed."""
        latents = moved(self.asked.latents, device).to(dtype)
        row, step = self.row, self.asked.step
        return RowStep(row.acting(step), step, latents, row.sequences, row.region, self.asked.whole)


def refused(row: OpenRow | None, asked: ControlStepRequest) -> tuple[StepRefusal, str] | None:
    """Code and sentence where a step cannot be one of `row`; None where it can."""
    if row is None:
        return (
            StepRefusal.ROW_UNKNOWN,
            f"the row {asked.row} is not open here to this denoiser; open it again",
        )
    if not 0 <= asked.step < len(row.times):
        return StepRefusal.STEP_MISMATCH, f"step {asked.step}; the row has {len(row.times)}"
    level = row.times[asked.step]
    if not math.isclose(asked.level, level, rel_tol=LEVEL_TOLERANCE, abs_tol=LEVEL_TOLERANCE):
        told = f"noise level {asked.level} in step {asked.step}; the row was opened with {level}"
        return StepRefusal.STEP_MISMATCH, told
    latents, wanted = tuple(asked.latents.shape), (row.tokens, row.base.latent_channels)
    if latents != wanted:
        return StepRefusal.STEP_MISMATCH, f"latents of {latents}; accepted: {wanted}, tokens and channels"
    shapes = row.shapes(asked.step, whole=asked.whole)
    if asked.shapes != shapes:
        told = f"samples of {asked.shapes}; step {asked.step} makes {shapes}, tokens and channels"
        return StepRefusal.STEP_MISMATCH, told
    return None


def sharing(tokens: Iterable[int], limit: int) -> int:
    """How many of the waiting steps, the first ones, share a forward of `limit` tokens at most; at least one."""
    total, count = 0, 0
    for each in tokens:
        total += each
        if count and total > limit:
            break
        count += 1
    return count


def first(steps: Iterable[QueuedStep], limit: int) -> list[QueuedStep]:
    """The waiting `steps` that share the next forward; see :func:`sharing`."""
    waiting = list(steps)
    return list(islice(waiting, sharing((each.tokens for each in waiting), limit)))
