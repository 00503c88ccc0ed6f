"""From what a job says of adapters to what its rows have of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from giornata.planning.operations import low_rank_weights
from giornata.wire.adapters import ControlUse, ControlWork, LoraUse
from giornata.wire.jobs import Job
from giornata.wire.progress import RowState
from giornata_denoiser.rows.adapters import Adapters, RowControl, RowLora

NO_NETS: Final[Mapping[str, ControlWork]] = MappingProxyType({})
ROUNDING: Final = 1e-9
"""Makes the share k / n of n steps k again."""


def adapters_of(
    job: Job, steps: int, resumed: RowState | None = None, nets: Mapping[str, ControlWork] = NO_NETS
) -> Adapters:
    """The adapters of a row of `job`, which has so many `steps` and goes on from `resumed`.

    LoRAs of a row that begins act from the last step that all of them allow. An engine lets them join earlier, unless
    the request tells the step. A row that goes on keeps what it began with. `nets` are the ControlNets that this
    process computes, by digest.
    """
    act = [lora for lora in job.loras if lora.modules and lora.scale]
    loras = (_lora(use) for use in act)
    bound = min((lora.joins_within for lora in act), default=0.0)
    loras_from = int(bound * steps + ROUNDING) if resumed is None else resumed.loras_from
    return Adapters(
        tuple(sorted(loras)),
        loras_from,
        tuple(_control(use, steps, nets) for use in job.controls),
        joins_early=job.parameters.lora_join is None,
    )


def _lora(use: LoraUse) -> RowLora:
    weights = low_rank_weights(use.weights, use.size_bytes)
    return RowLora(use.sha256, use.scale, use.rank, use.modules, use.size_bytes, weights)


def _control(use: ControlUse, steps: int, nets: Mapping[str, ControlWork]) -> RowControl:
    """The steps in which it acts are those that lie between its start and end, as pipelines of diffusers have it."""
    acts = [step for step in range(steps) if step / steps >= use.start and (step + 1) / steps <= use.end]
    first, end = (acts[0], acts[-1] + 1) if acts else (0, 0)
    return RowControl(use.model, use.digest, use.scale, first, end, use.mode, nets.get(use.digest))
