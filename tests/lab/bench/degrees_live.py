"""Deadlines kept by two processes that compute steps together or apart, live: the rule against fixed degrees.

``python -m tests.lab.bench.degrees_live``: a pool of two ranks on the CPU, one thread each, over a Flux of width 384
with random weights. Rows of three sizes arrive at random, each with a deadline that is a multiple of what it takes
alone on one device; that of the largest is shorter than that: they need both. Every rule gets the same arrivals, in
turns. What steps cost by degree is learned from steps, before the turns and in them. Nothing else should run
meanwhile.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from diffusers import FluxTransformer2DModel

from giornata.families import Family
from giornata.scheduling.degrees.fixed import FixedDegrees
from giornata.scheduling.degrees.pool import Devices, PoolDecision, PoolRow, PoolRule
from giornata.scheduling.degrees.rule import ReplanningRule
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.reporting.report import write
from giornata_lab.flags import option, parsed
from giornata_tools.model.random.build import build
from tests.integration.denoiser.pool.bench import Gathered, Model, Walk, profiled, running
from tests.patience import HUNG_S

DEVICES: Final = 2
SIDES: Final = (8, 16, 24)
"""Sides of pictures, in tokens."""
SLO: Final = {8: 3.0, 16: 2.0, 24: 0.85}
"""Deadlines, in what a row of this size takes alone on one device."""
STEPS: Final = 8
ROUNDS: Final = 3
"""Rounds of steps from which costs are learned."""
HEADS: Final = 6
AXES: Final = (8, 28, 28)
BLOCKS: Final = 3


def model_in(folder: Path) -> Model:
    """A checkpoint of Flux with random weights that takes tens of milliseconds a step, and its profile."""
    build(Family.FLUX_INPAINT, folder / "flux")
    torch.manual_seed(0)
    config = FluxTransformer2DModel.load_config(folder / "flux" / "transformer")
    config |= {
        "num_layers": BLOCKS,
        "num_single_layers": BLOCKS,
        "attention_head_dim": sum(AXES),
        "num_attention_heads": HEADS,
        "axes_dims_rope": list(AXES),
    }
    FluxTransformer2DModel.from_config(config).save_pretrained(folder / "flux" / "transformer")
    return profiled(folder / "flux", folder / "profile.json", degrees=(2,))


class Turns:
    """A rule that is another one from turn to turn."""

    def __init__(self, rule: PoolRule) -> None:
        self.rule = rule

    def decide(self, now_s: float, rows: Sequence[PoolRow], free: AbstractSet[int]) -> PoolDecision:
        """See :class:`giornata.scheduling.degrees.pool.PoolRule`."""
        return self.rule.decide(now_s, rows, free)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A row that is to come."""

    after_s: float
    """Since the turn began."""
    row: Row
    within_s: float


def arrivals(
    model: Model, took_s: Mapping[int, float], *, rows: int, load: float, seed: int
) -> list[Arrival]:
    """Poisson arrivals that keep so large a part of both devices busy, by the times of rows that are alone on one."""
    chance = random.Random(seed)  # noqa: S311 - a workload
    mean_s = statistics.mean(took_s.values()) / DEVICES / load
    found, now_s = [], 0.0
    for index in range(rows):
        now_s += chance.expovariate(1 / mean_s)
        side = chance.choice(SIDES)
        row = model.row(f"{seed}-{index}", grid=(side, side), steps=STEPS, seed=index)
        found.append(Arrival(now_s, row, SLO[side] * took_s[side]))
    return found


def turn(bench: Gathered, given: Sequence[Arrival], name: str) -> dict[str, Any]:
    """Let the rows arrive, wait for all of them, and tell how many were in time."""
    began = time.perf_counter()
    due: dict[str, tuple[float, float]] = {}
    ended: dict[str, float] = {}
    ahead = list(given)
    while len(ended) < len(given):
        if ahead and time.perf_counter() >= began + ahead[0].after_s:
            arrival = ahead.pop(0)
            now = time.perf_counter()
            key = dataclasses.replace(arrival.row.key, job_id=f"{name} {arrival.row.key.job_id}")
            due[key.job_id] = now, now + arrival.within_s
            bench.pool.submit([dataclasses.replace(arrival.row, key=key, due_s=now + arrival.within_s)])
        wait_s = began + ahead[0].after_s - time.perf_counter() if ahead else HUNG_S
        try:
            report = bench.told.get(timeout=max(0.0, wait_s))
        except queue.Empty:
            continue
        if not isinstance(report, StepReport) or report.failed:
            raise TypeError(f"a step failed: {report}")
        ended |= {row.key.job_id: report.ended_s for row in report.advanced if row.done}
    lasted = [ended[key] - at for key, (at, _) in due.items()]
    return {
        "met": sum(ended[key] <= by for key, (_, by) in due.items()) / len(due),
        "mean_s": statistics.mean(lasted),
        "p95_s": sorted(lasted)[int(0.95 * (len(lasted) - 1))],
    }


def alone_s(bench: Gathered, rule: Turns, model: Model) -> dict[int, float]:
    """Seconds of a row of each side, alone on one device; the pool learns what steps of both degrees take."""
    found: dict[int, float] = {}
    for number in range(2 * ROUNDS):
        devices: Devices = ((0,), (0, 1))[number % 2]
        rule.rule = Walk([devices] * STEPS)
        for side in SIDES:
            given = [Arrival(0.0, model.row("warm", grid=(side, side), steps=STEPS), math.inf)]
            lasted_s = turn(bench, given, f"round {number}")["mean_s"]
            if len(devices) == 1:
                found[side] = min(lasted_s, found.get(side, lasted_s))
    return found


def main() -> None:
    """Print the table and write ``out/bench/degrees_live.json``."""
    options = parsed(
        __doc__,
        [
            option("--rows", type=int, default=40, help="rows of a turn"),
            option("--turns", type=int, default=3, help="of each rule; each has arrivals of its own"),
            option("--load", type=float, default=0.6, help="part of both devices that is needed"),
        ],
    )
    with TemporaryDirectory() as folder:
        model = model_in(Path(folder))
        rule = Turns(ReplanningRule(DEVICES))
        with running(model.config(DEVICES), rule) as bench:
            took_s = alone_s(bench, rule, model)
            rules: dict[str, PoolRule] = {
                "by the rule": ReplanningRule(DEVICES),
                "degree 1 by deadline": FixedDegrees(DEVICES, 1, by_deadline=True),
                "degree 2 by deadline": FixedDegrees(DEVICES, 2, by_deadline=True),
            }
            told: dict[str, list[dict[str, Any]]] = {name: [] for name in rules}
            for seed in range(options.turns):
                given = arrivals(model, took_s, rows=options.rows, load=options.load, seed=seed)
                for name, one in rules.items():
                    rule.rule = one
                    told[name].append(turn(bench, given, name))
    ours = statistics.median(each["met"] for each in told["by the rule"])
    write(
        "degrees_live",
        [
            {
                "rule": name,
                "ours ÷ it": round(ours / max(1e-9, statistics.median(each["met"] for each in turns)), 2),
                "met": round(statistics.median(each["met"] for each in turns), 3),
                "least, most": [round(of(each["met"] for each in turns), 3) for of in (min, max)],
                "mean s": round(statistics.median(each["mean_s"] for each in turns), 2),
                "P95 s": round(statistics.median(each["p95_s"] for each in turns), 2),
            }
            for name, turns in told.items()
        ],
        workload={
            **vars(options),
            "sides": SIDES,
            "slo": SLO,
            "steps": STEPS,
            "alone_s": {side: round(seconds, 3) for side, seconds in took_s.items()},
        },
    )


if __name__ == "__main__":
    main()
