"""Deadlines kept by a simulated pool of eight H100s: ours, TetriServe's Algorithm 1, fixed degrees, and a bound.

The pictures are those of TetriServe's evaluation: 256 to 2048 pixels a side, 50 steps, 1.5 to 5 s times the SLO scale,
300 requests, Poisson at 12 a minute where nothing else is said; skewed mixes draw in proportion to exp(tokens /
16384). Step times are fitted to what TetriServe's paper says of its own (``tetriserve``), or derived from xDiT's
published ones (``h100``, compiled; ``h100-eager``). Baselines have the degrees 1, 2, 4 and 8. *As written*:
rounds as long as agrees with the paper's table 5, ties to fewest devices; other rounds take ties to progress. The bound
knows all arrivals; its steps are fluid. Masks: edits of 512 to 2048 with production's masks, 30 steps, scale 1.5.

Figures are means over seeds with standard errors.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Final

import click

from giornata.scheduling.degrees.pool import DEGREES
from giornata_lab.bench import harness
from giornata_lab.flags import Several, option, parsed
from giornata_lab.simulation.degrees.rules import (
    AS_WRITTEN,
    POWERS,
    RSSP,
    PoolRuleCase,
    RuleName,
    RuleSetting,
    bound_of,
    by_side,
    run_case,
    standard_error,
)
from giornata_lab.simulation.degrees.workloads import FORMULAS, SLO_S, PoolWorkload, SizeMix, StepFormula

SCALES: Final = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
RATES: Final = (6.0, 9.0, 12.0, 15.0, 18.0)
MASKED_RATES: Final = (12.0, 48.0, 96.0, 144.0, 192.0)
BOUND: Final = "bound"
SIDES: Final = {side: f"{side}²" for side in SLO_S}

OURS: Final = RuleSetting()
EVENTS: Final = RuleSetting(RuleName.EVENTS, POWERS)
BY_LENGTH: Final = tuple(RuleSetting(RuleName.ROUNDS, POWERS, round_steps=steps) for steps in (1, 2, 5))
BASELINES: Final[Mapping[str, RuleSetting]] = {
    **{f"degree {degree}": RuleSetting(RuleName.FIXED, (degree,)) for degree in POWERS},
    "best degree by resolution": RSSP,
    "Algorithm 1 as written": AS_WRITTEN,
    **{f"Algorithm 1, rounds of {r.round_steps}": r for r in BY_LENGTH},
    "Algorithm 1 at events": EVENTS,
}
RULES: Final[Mapping[str, RuleSetting]] = {
    **BASELINES,
    "ours, degrees 1, 2, 4, 8": replace(OURS, degrees=POWERS),
    "ours": OURS,
}
ROUNDS_OF_2: Final = replace(BY_LENGTH[1], degrees=DEGREES)
IN_FULL: Final = {"in full, Algorithm 1 in rounds of 2": ROUNDS_OF_2, "in full, ours": OURS}
"""Of edits with masks of which all tokens are computed."""
MASKS: Final = {
    "masks, Algorithm 1 in rounds of 2": ROUNDS_OF_2,
    "masks, Algorithm 1 at events": replace(EVENTS, degrees=DEGREES),
    "masks, degree 1": BASELINES["degree 1"],
    "masks, ours": OURS,
}
MASKED: Final = PoolWorkload(masks="production", steps=30, scale=1.5, per_minute=144)
DEVICES: Final = 8
FIGURES: Final = ("mean_s", "p50_s", "p95_s", "p99_s", "most_s", "busy", "moved")


@dataclass(frozen=True)
class AttainmentCell:
    """A workload of a table, and the rule that serves it; None: the bound."""

    table: str
    workload: str
    load: PoolWorkload
    """Its seed is replaced."""
    name: str
    rule: RuleSetting | None


def cells() -> Iterator[AttainmentCell]:
    """Those of all tables."""
    for mix in SizeMix:
        for scale in SCALES:
            yield from _column(f"scale, {mix}", f"{mix} {scale:.1f}", PoolWorkload(mix=mix, scale=scale))
    for mix in SizeMix:
        for rate in RATES:
            load = PoolWorkload(mix=mix, scale=1.5, per_minute=rate)
            yield from _column(f"rate, {mix}", f"{mix} 1.5, {rate:g}", load)
    for mix in SizeMix:
        yield from _column("bursts", f"{mix} 1.5, variation 3", PoolWorkload(mix=mix, scale=1.5, cv=3.0))
    for rate in MASKED_RATES:
        load, column = replace(MASKED, per_minute=rate), f"{rate:g} a minute"
        for name, rule in IN_FULL.items():
            yield AttainmentCell("masks", column, replace(load, in_full=True), name, rule)
        yield from _column("masks", column, load, MASKS)
    for mix in SizeMix:
        for scale in (1.0, 1.5):
            load = PoolWorkload(mix=mix, scale=scale, steps=28)
            yield from _column("28 steps", f"{mix} {scale:.1f}", load)


def _column(
    table: str, workload: str, load: PoolWorkload, rules: Mapping[str, RuleSetting] = RULES
) -> Iterator[AttainmentCell]:
    for name, rule in rules.items():
        yield AttainmentCell(table, workload, load, name, rule)
    yield AttainmentCell(table, workload, load, BOUND, None)


def row_of(cell: AttainmentCell, seeds: range, formula: StepFormula) -> dict[str, Any]:
    """What a cell comes to, a run for each seed."""
    row: dict[str, Any] = {"table": cell.table, "workload": cell.workload, "rule": cell.name}
    loads = [replace(cell.load, seed=seed) for seed in seeds]
    if cell.rule is None:
        bounds = [bound_of(load, DEVICES, formula) for load in loads]
        return {**row, "kept": round(fmean(bounds), 4), **dict.fromkeys(("±", *FIGURES, *SIDES.values()), "")}
    runs = [run_case(PoolRuleCase(load, cell.rule, DEVICES, formula)) for load in loads]
    kept = [run.summary.attainment for run in runs]
    sides = by_side(outcome for run in runs for outcome in run.outcomes)
    means = {key: fmean(getattr(run.summary, key) for run in runs) for key in FIGURES}
    return {
        **row,
        "kept": round(fmean(kept), 4),
        "±": round(standard_error(kept), 4),
        **{key: round(value, 3) for key, value in means.items()},
        **{name: round(sides[side], 3) if side in sides else "" for side, name in SIDES.items()},
    }


def _redirect() -> None:
    """HiGHS prints lines of its own to standard output, where tables are read from."""
    sys.stdout.flush()
    os.dup2(2, 1)


def main() -> None:
    """Print and write ``out/bench/degrees.json``."""
    options = parsed(
        __doc__,
        [
            option("--seeds", type=int, default=5, help="runs of each kind, with requests of their own"),
            option("--requests", type=int, default=300, help="of a run"),
            option("--only", type=Several(str), default="", help="tables whose names begin so, with commas"),
            option("--machine", type=click.Choice(list(FORMULAS)), default="tetriserve", help="step times"),
            option("--processes", type=int, default=2, help="runs at the same time"),
        ],
    )
    chosen = [
        replace(cell, load=replace(cell.load, requests=options.requests))
        for cell in cells()
        if not options.only or cell.table.startswith(tuple(options.only))
    ]
    began, formula = time.perf_counter(), FORMULAS[options.machine]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, spawned, initializer=_redirect) as pool:
        rows = list(pool.map(partial(row_of, seeds=range(options.seeds), formula=formula), chosen))
    harness.write(
        "degrees",
        rows,
        workload={
            "devices": DEVICES,
            "machine": options.machine,
            "formula": asdict(formula),
            "requests": options.requests,
            "seeds": options.seeds,
            "settings": {f"{cell.table}, {cell.workload}": asdict(cell.load) for cell in chosen},
            "seconds": round(time.perf_counter() - began),
            "±": "standard error of the mean over seeds",
        },
    )


if __name__ == "__main__":
    main()
