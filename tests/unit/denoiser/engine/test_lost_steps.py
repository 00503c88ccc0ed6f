"""Steps that are lost inside the network, for want of what a ControlNet adds: repeated as if none had been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from giornata.packed.uses import Residuals
from giornata_denoiser.blocks.waits import WaitTimer
from giornata_denoiser.choices import EXACT
from giornata_denoiser.engine.controls import ControlLost, NoControls, OfSequences
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.sources import ReuseOptions
from giornata_denoiser.rows.row import Row
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec
from tests.unit.denoiser.engine.edits import GRID, ROOMY, edit, finished, template
from tests.unit.denoiser.engine.test_masked import DOUBLE, FLOAT32

STEPS = 6


@dataclass
class Failing(Residuals):
    """Adds nothing, and is lost behind a block."""

    row: Row
    behind: int
    whole: bool = True

    def sample(self, block: int) -> Tensor | None:
        if block == self.behind:
            raise ControlLost({self.row.key})
        return None


@dataclass
class Losing(NoControls):
    """Loses the first row once in a step, behind a block."""

    step: int
    behind: int
    lost: list[int] = field(default_factory=list)

    def residuals(
        self, rows: Sequence[Row], whole: Sequence[bool], waits: WaitTimer
    ) -> tuple[OfSequences, ...]:
        if rows[0].step != self.step or self.lost:
            return super().residuals(rows, whole, waits)
        self.lost.append(rows[0].step)
        failing: tuple[Residuals, ...] = (Failing(rows[0], self.behind),) * len(rows[0].prompts)
        return (failing, *(() for _ in rows[1:]))


@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize("behind", [0, 3])
def test_a_repeated_step_makes_what_it_would_have_made(step: int, behind: int) -> None:
    """Corrections that are learned, and keys and values that are kept, are half written by then."""
    of = tiny_flux.family(dtype=DOUBLE)
    plain = edit(of, None, Spec("renewing", grid=GRID, steps=STEPS, seed=2, true_cfg_scale=2.0))
    rows = [
        replace(plain, renewed_every=3, keeps_padding=True),
        edit(of, template(of, steps=STEPS), Spec("taking", grid=GRID, steps=STEPS, seed=3)),
    ]
    ends = []
    for controls in (NoControls(), Losing(step, behind)):
        made = Engine(of, ROOMY, lambda: 0.0, reusing=ReuseOptions(correction_bits=EXACT), controls=controls)
        made.batch.submit(rows)
        ends.append(finished(made))
    assert controls.lost == [step]  # type: ignore[attr-defined]  # of the last one
    for name, row in ends[0].items():
        torch.testing.assert_close(ends[1][name].latent, row.latent, atol=FLOAT32, rtol=0)
