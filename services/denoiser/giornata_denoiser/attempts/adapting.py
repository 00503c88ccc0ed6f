"""From what a job says of adapters to what its rows have of them. Pure."""

from __future__ import annotations

from giornata.wire.adapters import ControlUse
from giornata.wire.jobs import Job
from giornata_denoiser.rows.adapters import Adapters, RowControl, RowLora


def adapters_of(job: Job, steps: int, loras_from: int = 0) -> Adapters:
    """The adapters of the rows of `job`, which have so many `steps`."""
    loras = (
        RowLora(lora.sha256, lora.scale, lora.rank, lora.modules, lora.size_bytes)
        for lora in job.loras
        if lora.modules and lora.scale
    )
    return Adapters(tuple(sorted(loras)), loras_from, tuple(_control(use, steps) for use in job.controls))


def _control(use: ControlUse, steps: int) -> RowControl:
    """The steps in which it acts are those that lie between its start and end, as pipelines of diffusers have it."""
    acts = [step for step in range(steps) if step / steps >= use.start and (step + 1) / steps <= use.end]
    first, end = (acts[0], acts[-1] + 1) if acts else (0, 0)
    return RowControl(use.model, use.digest, use.scale, first, end, use.mode)
