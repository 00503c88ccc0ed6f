"""Engines of rows under ControlNets that others compute, or nobody; and which one `auto` chooses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Final, NamedTuple

import torch

from giornata.planning.cost_model import CostModel
from giornata.scheduling.batch import Capacity
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.choices import ControlNetExecutor
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.controls.controlnets import open_rows
from giornata_denoiser.controls.executor_choice import ResidualTiming, exposed_ms
from giornata_denoiser.engine.batch_tensors import ControlExecutor
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute.control_nets import ControlledStep
from giornata_lab.bench.compute.diffusers_steps import DiffusersStep
from giornata_lab.bench.compute.models import transformer_of
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.bench.compute.workload import WorkloadEdit
from giornata_lab.bench.systems.control_rooms import ControlRoom, Requests, Servers
from giornata_lab.bench.systems.control_turns import Step, Turns, TurnSetting
from giornata_lab.bench.systems.cores import Neighbour

STEPS: Final = 400
"""Steps of every row: more than are measured."""
HELD_STEPS: Final[int] = DenoiserConfig.control_held_steps
OPENS_S: Final = 60
SETTLING: Final = 3
"""Measurements of a setting before `auto` is asked."""
FULL: Final = 1.0
"""A mask that leaves nothing to be taken from elsewhere."""
TOKENS: Final = 1 << 20


@dataclass(frozen=True)
class ControlScene:
    """What all workloads share."""

    options: SimpleNamespace
    rows: Rows
    checkpoint: Checkpoint
    costs: CostModel
    servers: Servers
    service: int
    """Its process id."""
    beside: Neighbour
    rooms: Mapping[ControlNetExecutor, ControlRoom]
    requests: Requests

    def plain(self, mask: float, count: int) -> list[Row]:
        """Rows without ControlNets; masked ones compute their first step in full, and take from it later."""
        edit = WorkloadEdit(0, 0, mask, 0.5, 0.5, STEPS)
        if mask == FULL:
            return [self.rows.row(edit, reuse=False)] * count
        return [replace(self.rows.masked(edit), renewed_every=STEPS)] * count


@dataclass
class Stepping:
    """An engine with its rows."""

    engine: Engine
    latents: list[torch.Tensor] = field(default_factory=list)
    """By row, after the latest step."""

    def __call__(self) -> float:
        """One step; milliseconds of it that were waited for ControlNets."""
        report = self.engine.step()
        if report is None or report.failed or report.sample is None:
            raise SystemExit(f"a step failed: {report}")
        self.latents = [row.latent for row in sorted(report.advanced, key=lambda row: row.key.index)]
        return report.sample.controls_waited_ms


async def stepping(
    scene: ControlScene, plain: Sequence[Row], executor: ControlNetExecutor | None, stack: AsyncExitStack
) -> Stepping:
    """An engine with rows whose ControlNets are computed so, open for as long as `stack`; None: without any."""
    request, rows = await scene.requests.made(plain, controlled=executor is not None)
    controls: ControlExecutor | None = None
    if executor is not None:
        chosen = scene.rooms[executor]
        kept = await stack.enter_async_context(open_rows(chosen.room, request, rows))
        controls, rows = chosen.room.controls, list(kept.rows)
        if executor is ControlNetExecutor.SERVICE:
            for _ in rows:
                await asyncio.wait_for(chosen.resumed.get(), OPENS_S)
    # Steps at the service are no samples of what this process does alone.
    reusing = ReuseOptions() if executor is ControlNetExecutor.SERVICE else ReuseOptions(model=scene.costs)
    engine = Engine(
        scene.rows.family, Capacity(len(rows), TOKENS), time.perf_counter, reusing=reusing, controls=controls
    )
    engine.batch.submit(rows)
    return Stepping(engine)


async def diffusers(scene: ControlScene, plain: Sequence[Row]) -> dict[TurnSetting, Step]:
    """Steps of pipelines over equal rows."""
    _, rows = await scene.requests.made(plain, controlled=True)
    family, texts = scene.rows.family, [scene.rows.text(0)] * len(rows)
    nets = [net.net for net in scene.checkpoint.controlnets.values()]
    found = {
        TurnSetting.DIFFUSERS_NONE: DiffusersStep("flux", transformer_of(family), family, rows, texts),
        TurnSetting.DIFFUSERS: ControlledStep(family, rows, texts, nets),
    }

    def stepped(step: DiffusersStep) -> Step:
        @torch.inference_mode()
        def once() -> float:
            step()
            return 0.0

        return once

    return {setting: stepped(step) for setting, step in found.items()}


class Choice(NamedTuple):
    """What `auto` chooses in a setting, and what it predicts of a step that asks."""

    at_service: bool
    exposed_ms: float
    """Predicted time for which a step waits for one row that the service computes."""
    local_ms: float
    """Predicted time of one row that this process computes."""
    moved_bytes: int
    """Size of samples and latents, each time that a row's are asked for."""
    due: tuple[ResidualTiming, ...]


async def choice(scene: ControlScene, turns: Turns, setting: TurnSetting, step: Step, plain: Row) -> Choice:
    """As an instance and this process know of each other after some steps of the setting."""
    for _ in range(SETTLING):
        await turns.timed(setting, step)
    for _ in range(2):  # the room has heard the first one when the second one comes
        state = await scene.servers.heard()
    _, (row,) = await scene.requests.made([plain], controlled=True)
    auto = scene.rooms[ControlNetExecutor.AUTO].room
    (placed,) = auto.placed([row])
    work = auto._work(row)
    return Choice(
        not any(use.work for use in placed.adapters.controls),
        exposed_ms(work, state, auto._here()),
        work.local_ms,
        work.moved_bytes + row.latent.numel() * scene.rows.family.dtype.itemsize,
        work.due,
    )
