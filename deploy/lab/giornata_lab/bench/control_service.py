"""A step under three ControlNets at a service of their own, beside the same step without any.

``python -m giornata_lab.bench.control_service``. The service is a real process behind real NATS and Valkey servers; the
denoiser's side is its engine, its control room and its data path in this process. Each computes in one thread. All of
these take turns:

- *none*: the engine's step without ControlNets;
- *none, other core busy*: the same while a process multiplies matrices on the other core: cores share caches;
- *here*: the engine computes them before its step, the sum of the work;
- *service, own core*: this process on one core, the service on another;
- *service, one core*: both on the same one;
- *diffusers*, *diffusers, none*: what a pipeline's loop does, with the forwards of three ControlNets before the
  transformer's, or without; in full alone, and divided by each other.

The ControlNets have the blocks of published ones for FLUX.1-dev with its 19 + 38: a union's 5 + 10, and 6 and 4 double
blocks. `deep` has FLUX.1-dev's 57 blocks at an eighth of its width, so that every block has its real share of the work;
other shapes have as many blocks as the proportion leaves. What ControlNets add to masked rows serves two steps, which
are measured together.

*÷ none* is by processor time, so that others who share the machine do not count: the sum of both processes on one core.
On cores of their own it is what this process computes and what it would wait for, if the service had its core for
itself: each sum of samples is made after its share of the service's time, and read after its share of the step's.
*by the clock* is of those pairs of measurements alone in which others had the cores for less than `--disturbed` of the
time; *quiet* counts them. With fewer than two it is of all, and worth nothing. *waited* is how long blocks waited for
samples, by the clock.

*predicted* is what the denoiser expects ControlNets to add, *added* what they did. `auto` is asked after some steps of
a setting; its *loss* is against the better executor. The service needs a core of its own: two in all.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from giornata.blobs import RedisBlobs
from giornata.bus import bus
from giornata.families import Family
from giornata.planning.cost_model import CostModel
from giornata.planning.operations import step_work
from giornata.scheduling.batch import Capacity
from giornata.wire.values import BlockMode
from giornata.wire.workers import CostFit
from giornata_denoiser.checkpoint import Checkpoint, open_checkpoint
from giornata_denoiser.choices import ControlNetExecutor
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.controls.local import control_target, open_controls
from giornata_denoiser.engine.engine import Engine
from giornata_lab.bench.compute.control_nets import saved
from giornata_lab.bench.compute.models import described
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.bench.compute.workload import WorkloadEdit
from giornata_lab.bench.options import rows_of, shared
from giornata_lab.bench.reporting.report import write
from giornata_lab.bench.systems.control_rooms import Requests, Servers, instance, room
from giornata_lab.bench.systems.control_scene import (
    FULL,
    HELD_STEPS,
    TOKENS,
    Choice,
    ControlScene,
    Stepping,
    choice,
    diffusers,
    stepping,
)
from giornata_lab.bench.systems.control_turns import Pair, Step, Turns, TurnSetting, TurnTimes, ratios
from giornata_lab.bench.systems.cores import neighbour
from giornata_lab.bench.systems.servers import embedded
from giornata_lab.flags import Several, option, parsed
from giornata_tools.model.random.build import build

EQUAL: Final = 1e-3
"""Largest difference of latents between executors, relative to the largest value."""
WARM_UP: Final = 2
"""Measurements of each engine that do not count."""


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    taken = {"model", "tokens", "text", "dtype", "repeats"}
    return parsed(
        __doc__,
        [
            *(flag for flag in shared(tokens=256, text=32, repeats=7, model="deep") if flag.name in taken),
            option("--rows", type=Several(int), default=[1, 4], help="of a step"),
            option(
                "--masks", type=Several(float), default=[FULL, 0.2], help="mask ratios; 1 computes in full"
            ),
            option("--disturbed", type=float, default=0.03, help="share of others that still counts"),
            option("--turns", type=int, default=20, help="at most"),
        ],
        arguments,
    )


async def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/control_service.json``."""
    options = options_of(arguments)
    options.device, options.threads = "cpu", 1
    rows = rows_of(options)
    lines, loads = [], [os.getloadavg()[0]]
    async with AsyncExitStack() as stack:
        scene = await _scene(options, rows, stack)
        for mask in options.masks:
            for count in options.rows:
                lines += await _workload(scene, count, mask)
                loads.append(os.getloadavg()[0])
    workload = {**vars(options), "model": described(rows.family), "load averages": loads}
    write("control_service", lines, workload=workload)


async def _scene(options: SimpleNamespace, rows: Rows, stack: AsyncExitStack) -> ControlScene:
    nats_url, blobs_url = stack.enter_context(embedded())
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gio-control-")))
    servers = Servers(
        await stack.enter_async_context(bus.connect(nats_url, "bench")),
        await stack.enter_async_context(RedisBlobs.open(blobs_url)),
        nats_url,
        blobs_url,
    )
    configured = saved(rows.family, folder)
    checkpoint = _checkpoint(rows, configured, folder)
    costs = _costs(rows)
    service = await stack.enter_async_context(instance(servers, configured, rows.family.dtype))
    rooms = {
        executor: await stack.enter_async_context(room(servers, checkpoint, costs, executor))
        for executor in ControlNetExecutor
    }
    requests = Requests(servers, checkpoint, rows, checkpoint.controlnets)
    beside = stack.enter_context(neighbour((os.cpu_count() or 1) - 1))
    return ControlScene(options, rows, checkpoint, costs, servers, service, beside, rooms, requests)


def _checkpoint(rows: Rows, configured: str, folder: Path) -> Checkpoint:
    """The bench's family with three ControlNets, under the card of a small one."""
    build(Family.FLUX_INPAINT, folder / "card")
    small = open_checkpoint(DenoiserConfig(model=str(folder / "card"), device="cpu"))
    family = rows.family
    network = control_target(family.network, small.card.pixel_multiple)
    nets = open_controls(configured, network, dtype=family.dtype, device=family.device)
    return replace(small, family=family, controlnets=nets)


def _costs(rows: Rows) -> CostModel:
    """As a profile would tell them; engines that ask no service refine them."""
    row = rows.row(WorkloadEdit(0, 0, FULL, 0.5, 0.5, 4), reuse=False)
    engine = Engine(rows.family, Capacity(1, TOKENS), time.perf_counter)
    engine.batch.submit([row])
    times = []
    while engine.batch.running or engine.batch.waiting:
        began = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - began) * 1e3)
    operations = rows.family.operations
    work = step_work(operations, row.shapes, [(BlockMode.FULL,) * operations.blocks])
    weight = min(times) / work.multiplications
    fit = partial(CostFit, r2=1.0, residual_ms=0.1 * min(times), samples=0, outliers=0)
    return CostModel(fit(weights=(0.0, 0.0, weight, weight, 0.0, 0.0)), fit(weights=(0.0, 0.0)))


async def _workload(scene: ControlScene, count: int, mask: float) -> list[dict[str, Any]]:
    plain = scene.plain(mask, count)
    held = 1 if mask == FULL else HELD_STEPS
    turns = Turns(scene.service, scene.beside, held, scene.options.disturbed)
    async with AsyncExitStack() as stack:
        here = await stepping(scene, plain, ControlNetExecutor.LOCAL, stack)
        there = await stepping(scene, plain, ControlNetExecutor.SERVICE, stack)
        steps: dict[TurnSetting, Step] = {
            TurnSetting.NONE: await stepping(scene, plain, None, stack),
            TurnSetting.HERE: here,
            TurnSetting.OWN: there,
        }
        for _ in range(WARM_UP):
            for setting, step in steps.items():
                await turns.timed(setting, step)
        _compare(here, there)
        steps |= {TurnSetting.BESIDE: steps[TurnSetting.NONE], TurnSetting.SHARED: there}
        if mask == FULL:
            steps |= await diffusers(scene, plain)
        pairs = await turns.measured(steps, scene.options.repeats, scene.options.turns)
        chosen = {
            setting: await choice(scene, turns, setting, there, plain[0])
            for setting in (TurnSetting.OWN, TurnSetting.SHARED)
        }
    return _lines(turns, pairs, chosen, {"m": mask, "rows": count})


def _compare(here: Stepping, there: Stepping) -> None:
    """Both executors have made as many steps."""
    for mine, other in zip(here.latents, there.latents, strict=True):
        off = float((mine - other).abs().max() / mine.abs().max())
        if off > EQUAL:
            raise SystemExit(f"latents of the executors are {off:.1e} apart; equal is {EQUAL:.0e}")


def _lines(
    turns: Turns,
    pairs: Mapping[TurnSetting, Sequence[Pair]],
    chosen: Mapping[TurnSetting, Choice],
    of: dict[str, Any],
) -> list[dict[str, Any]]:
    """By setting."""
    lines = []
    by_processor = {
        setting: [_processor_ms(taken, setting, chosen, turns) / base.mine_ms for taken, base in found]
        for setting, found in pairs.items()
    }
    for setting, found in pairs.items():
        counting, their = turns.counting(found), by_processor[setting]
        line = {
            **of,
            "ControlNets": str(setting),
            "÷ none": round(statistics.median(their), 3),
            "spread": f"{min(their):.2f}-{max(their):.2f}",
            "by the clock": round(statistics.median(ratios(counting)), 3),
            "quiet": f"{len(turns.quiet(found))}/{len(found)}",
            "here ms": round(statistics.median(taken.mine_ms for taken, _ in found), 1),
            "service ms": round(statistics.median(taken.service_ms for taken, _ in found), 1),
            "added ms": round(
                statistics.median(_added_ms(pair, setting, chosen, turns) for pair in found), 1
            ),
            "predicted": "",
            "waited": round(statistics.median(taken.waited_ms for taken, _ in counting), 1),
            **dict.fromkeys(("MB", "auto", "loss"), ""),
        }
        if (answer := chosen.get(setting)) is not None:
            share = of["rows"] / turns.steps
            line["predicted"] = round(answer.exposed_ms * share, 1)
            line["MB"] = round(answer.moved_bytes * share / 1e6, 2)
            line["auto"] = "service" if answer.at_service else "here"
            medians = {each: statistics.median(by_processor[each]) for each in (TurnSetting.HERE, setting)}
            mine = medians[setting if answer.at_service else TurnSetting.HERE]
            line["loss"] = round(mine / min(medians.values()) - 1, 3)
        elif setting is TurnSetting.HERE:
            line["predicted"] = round(chosen[TurnSetting.OWN].local_ms * of["rows"] / turns.steps, 1)
        lines.append(line)
    return lines


def _processor_ms(
    taken: TurnTimes, setting: TurnSetting, chosen: Mapping[TurnSetting, Choice], turns: Turns
) -> float:
    """A step on cores that nobody else uses: what was computed, and on cores of their own what is waited for."""
    if setting is not TurnSetting.OWN:
        return taken.mine_ms + taken.service_ms
    late = (
        taken.service_ms * made - taken.mine_ms * read / turns.steps for made, read in chosen[setting].due
    )
    return taken.mine_ms + max(0.0, *late)


def _added_ms(pair: Pair, setting: TurnSetting, chosen: Mapping[TurnSetting, Choice], turns: Turns) -> float:
    taken, base = pair
    return _processor_ms(taken, setting, chosen, turns) - base.mine_ms


if __name__ == "__main__":
    asyncio.run(main())
