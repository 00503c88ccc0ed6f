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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
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
    BoundCase,
    PoolRuleCase,
    PoolRun,
    RuleName,
    RuleSetting,
    bound_of,
    by_side,
    run_case,
    standard_error,
)
from giornata_lab.simulation.degrees.step_times import FORMULAS, StepFormula
from giornata_lab.simulation.degrees.workloads import SLO_S, PoolWorkload, SizeMix

SCALES: Final = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
RATES: Final = (6.0, 9.0, 12.0, 15.0, 18.0)
MASKED_RATES: Final = (12.0, 48.0, 96.0, 144.0, 192.0)
BOUND: Final = "bound"

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
MASKED: Final = PoolWorkload(masks="production", steps=30, scale=1.5, per_minute=144)


@dataclass(frozen=True)
class PoolEntry:
    """A row of a table."""

    rule: RuleSetting
    in_full: bool = False
    """Whether it computes all tokens of masked pictures."""


@dataclass(frozen=True)
class Table:
    """Attainment of rules on workloads."""

    name: str
    loads: Mapping[str, PoolWorkload]
    """The workload of each column; its seed is replaced."""
    entries: Mapping[str, PoolEntry]
    bound: bool = True


def tables() -> Iterator[Table]:
    """All of them."""
    for mix in SizeMix:
        loads = {f"{mix} {scale:.1f}": PoolWorkload(mix=mix, scale=scale) for scale in SCALES}
        yield Table(f"scale, {mix}", loads, _entries(RULES))
    for mix in SizeMix:
        loads = {f"{mix} 1.5, {rate:g}": PoolWorkload(mix=mix, scale=1.5, per_minute=rate) for rate in RATES}
        yield Table(f"rate, {mix}", loads, _entries(RULES))
    bursts = {f"{mix} 1.5, variation 3": PoolWorkload(mix=mix, scale=1.5, cv=3.0) for mix in SizeMix}
    yield Table("bursts", bursts, _entries(RULES))
    yield Table("masks", {f"{r:g} a minute": replace(MASKED, per_minute=r) for r in MASKED_RATES}, _masked())
    short = {
        f"{mix} {s:.1f}": PoolWorkload(mix=mix, scale=s, steps=28) for mix in SizeMix for s in (1.0, 1.5)
    }
    yield Table("28 steps", short, _entries(RULES))


def _entries(rules: Mapping[str, RuleSetting]) -> Mapping[str, PoolEntry]:
    return {name: PoolEntry(rule) for name, rule in rules.items()}


def _masked() -> Mapping[str, PoolEntry]:
    rounds = replace(BY_LENGTH[1], degrees=DEGREES)
    return {
        "in full, Algorithm 1 in rounds of 2": PoolEntry(rounds, in_full=True),
        "in full, ours": PoolEntry(OURS, in_full=True),
        "masks, Algorithm 1 in rounds of 2": PoolEntry(rounds),
        "masks, Algorithm 1 at events": PoolEntry(replace(EVENTS, degrees=DEGREES)),
        "masks, degree 1": PoolEntry(BASELINES["degree 1"]),
        "masks, ours": PoolEntry(OURS),
    }


DEVICES: Final = 8


@dataclass(frozen=True)
class Simulated:
    """All runs, each made once."""

    runs: Mapping[PoolRuleCase, PoolRun]
    bounds: Mapping[PoolWorkload, float]
    seeds: range
    formula: StepFormula

    def of(self, entry: PoolEntry, load: PoolWorkload) -> list[PoolRun]:
        """Runs of a table's cell, one for each seed."""
        return [self.runs[case] for case in cases(entry, load, self.seeds, self.formula)]

    def bound(self, load: PoolWorkload) -> float:
        """Mean over seeds."""
        return fmean(self.bounds[replace(load, seed=seed)] for seed in self.seeds)


def cases(entry: PoolEntry, load: PoolWorkload, seeds: range, formula: StepFormula) -> list[PoolRuleCase]:
    """Cases of a table's cell, one for each seed."""
    loads = [replace(load, in_full=entry.in_full, seed=seed) for seed in seeds]
    return [PoolRuleCase(drawn, entry.rule, DEVICES, formula) for drawn in loads]


@contextmanager
def side_by_side(count: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes, which end with the block; what libraries in them print goes to standard error."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, initializer=_redirect) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _redirect() -> None:
    """HiGHS prints lines of its own to standard output, where tables are read from."""
    sys.stdout.flush()
    os.dup2(2, 1)


def simulate(chosen: Sequence[Table], seeds: range, processes: int, formula: StepFormula) -> Simulated:
    """Run everything that tables need, and every bound once."""
    wanted = {
        case: None
        for table in chosen
        for load in table.loads.values()
        for entry in table.entries.values()
        for case in cases(entry, load, seeds, formula)
    }
    bounded = {
        replace(load, seed=seed): None
        for table in chosen
        if table.bound
        for load in table.loads.values()
        for seed in seeds
    }
    with side_by_side(processes) as pool:
        runs = pool.map(run_case, wanted, chunksize=4)
        bounds = pool.map(bound_of, [BoundCase(load, devices=DEVICES, formula=formula) for load in bounded])
        found = dict(zip(wanted, runs, strict=True)), dict(zip(bounded, bounds, strict=True))
        return Simulated(*found, seeds, formula)


def rows_of(table: Table, found: Simulated) -> Iterator[dict[str, Any]]:
    """A row for each rule and workload."""
    for column, load in table.loads.items():
        for name, entry in table.entries.items():
            runs = found.of(entry, load)
            kept = [run.summary.attainment for run in runs]
            sides = by_side(outcome for run in runs for outcome in run.outcomes)
            means = {key: fmean(asdict(run.summary)[key] for run in runs) for key in FIGURES}
            yield {
                "table": table.name,
                "workload": column,
                "rule": name,
                "kept": round(fmean(kept), 4),
                "±": round(standard_error(kept), 4),
                **{key: round(value, 3) for key, value in means.items()},
                **{f"{side}²": round(sides[side], 3) if side in sides else "" for side in SLO_S},
            }
        if table.bound:
            empty = dict.fromkeys(("±", *FIGURES, *(f"{side}²" for side in SLO_S)), "")
            kept_most = round(found.bound(load), 4)
            yield {"table": table.name, "workload": column, "rule": BOUND, "kept": kept_most, **empty}


FIGURES: Final = ("mean_s", "p50_s", "p95_s", "p99_s", "most_s", "busy", "moved")


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
        replace(
            table,
            loads={name: replace(load, requests=options.requests) for name, load in table.loads.items()},
        )
        for table in tables()
        if not options.only or table.name.startswith(tuple(options.only))
    ]
    began = time.perf_counter()
    found = simulate(chosen, range(options.seeds), options.processes, FORMULAS[options.machine])
    rows = [row for table in chosen for row in rows_of(table, found)]
    harness.write(
        "degrees",
        rows,
        workload={
            "devices": DEVICES,
            "machine": options.machine,
            "formula": asdict(found.formula),
            "requests": options.requests,
            "seeds": list(found.seeds),
            "settings": {
                table.name: {name: asdict(load) for name, load in table.loads.items()} for table in chosen
            },
            "runs": len(found.runs),
            "seconds": round(time.perf_counter() - began),
            "±": "standard error of the mean over seeds",
        },
    )


if __name__ == "__main__":
    main()
