"""Deadlines kept by a simulated pool of eight H100s: ours, TetriServe's Algorithm 1, fixed degrees, and a bound.

The pictures are those of TetriServe's evaluation: 256 to 2048 pixels a side, 50 steps, 1.5 to 5 s times the SLO scale,
300 requests, Poisson at 12 a minute where nothing else is said; skewed mixes draw in proportion to exp(tokens /
16384). Step times are derived from published ones (``h100-eager``). Baselines have the degrees 1, 2, 4 and 8. *As
written*: five steps a round, ties to fewest devices; other rounds take ties to progress. The bound knows all
arrivals; its steps are fluid. Masks: edits of 512 to 2048 with production's masks, 30 steps, scale 1.5.

Figures are means over seeds with standard errors. Besides ``out/bench/degrees.json`` there are the same tables as
``degrees.md``, and charts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Final

from giornata_lab.bench.reporting import report
from giornata_lab.bench.systems.pools import BETWEEN, BOUND, SCALES, PoolEntry, Table, tables
from giornata_lab.flags import Several, option, parsed
from giornata_lab.loadgen.charts import Chart, Points, PointStyle
from giornata_lab.loadgen.drawing import figure, svg
from giornata_lab.simulation.degrees import results
from giornata_lab.simulation.degrees.results import PoolRun, standard_error
from giornata_lab.simulation.degrees.rules import BoundCase, PoolRuleCase, bound_of, run_case
from giornata_lab.simulation.degrees.workloads import SLO_S, PoolWorkload
from giornata_tools.processes import side_by_side

DEVICES: Final = 8
DRAWN: Final = (
    "ours",
    "Algorithm 1 at events",
    "Algorithm 1, rounds of 2",
    "Algorithm 1 as written",
    "degree 8",
    "best degree by resolution",
)
"""Rules in charts."""


@dataclass(frozen=True)
class Simulated:
    """All runs, each made once."""

    runs: Mapping[PoolRuleCase, PoolRun]
    bounds: Mapping[PoolWorkload, float]
    seeds: range

    def of(self, entry: PoolEntry, load: PoolWorkload) -> list[PoolRun]:
        """Runs of a table's cell, one for each seed."""
        return [self.runs[case] for case in cases(entry, load, self.seeds)]

    def bound(self, load: PoolWorkload) -> float:
        """Mean over seeds."""
        return fmean(self.bounds[replace(load, seed=seed)] for seed in self.seeds)


def cases(entry: PoolEntry, load: PoolWorkload, seeds: range) -> list[PoolRuleCase]:
    """Cases of a table's cell, one for each seed."""
    return [
        PoolRuleCase(replace(load, in_full=entry.in_full, seed=seed), entry.rule, DEVICES) for seed in seeds
    ]


def simulate(chosen: Sequence[Table], seeds: range, processes: int) -> Simulated:
    """Run everything that tables need, and every bound once."""
    wanted = {
        case: None
        for table in chosen
        for load in table.loads.values()
        for entry in table.entries.values()
        for case in cases(entry, load, seeds)
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
        bounds = pool.map(bound_of, [BoundCase(load, devices=DEVICES) for load in bounded])
        return Simulated(dict(zip(wanted, runs, strict=True)), dict(zip(bounded, bounds, strict=True)), seeds)


def rows_of(table: Table, found: Simulated) -> Iterator[dict[str, Any]]:
    """A row for each rule and workload."""
    for column, load in table.loads.items():
        for name, entry in table.entries.items():
            runs = found.of(entry, load)
            kept = [run.summary.attainment for run in runs]
            sides = results.by_side(outcome for run in runs for outcome in run.outcomes)
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


def markdown(table: Table, found: Simulated) -> str:
    """Attainment ± standard error of each rule, and the mean over the columns."""
    lines = [f"## {table.name}", ""]
    lines += [f"| kept | {' | '.join(table.loads)} | mean |", f"|{'---|' * (len(table.loads) + 2)}"]
    for name, entry in table.entries.items():
        kept = [[run.summary.attainment for run in found.of(entry, load)] for load in table.loads.values()]
        cells = [f"{fmean(each):.3f} ± {standard_error(each):.3f}" for each in kept]
        lines.append(f"| {name} | {' | '.join(cells)} | {fmean(fmean(each) for each in kept):.4f} |")
    if table.bound:
        bounds = [found.bound(load) for load in table.loads.values()]
        cells = [f"{share:.3f}" for share in bounds]
        lines.append(f"| {BOUND} | {' | '.join(cells)} | {fmean(bounds):.4f} |")
    return "\n".join(lines) + "\n"


def charts(chosen: Sequence[Table], found: Simulated) -> dict[str, Chart]:
    """Charts by file name."""
    drawn: dict[str, Chart] = {}
    for table in chosen:
        kind, _, mix = table.name.partition(", ")
        entries = {name: table.entries[name] for name in DRAWN if name in table.entries}
        if kind == "scale":
            lines = _over(table, entries, found, [load.scale for load in table.loads.values()])
            drawn[f"degrees_scale_{mix}"] = Chart(f"Deadlines kept, {mix}", "SLO scale", "share", lines)
            last = table.loads[f"{mix} {SCALES[-1]:.1f}"]
            runs = {name: found.of(entry, last) for name, entry in entries.items()}
            labelled = [replace(run, rule=name) for name, each in runs.items() for run in each]
            drawn[f"degrees_latency_{mix}"] = Chart(
                f"Pictures ended within, {mix}, scale 1.5",
                "seconds",
                "share",
                results.latency_lines(labelled),
                PointStyle.LINE,
            )
            drawn[f"degrees_side_{mix}"] = Chart(
                f"Deadlines kept by resolution, {mix}, scale 1.5",
                "pixels a side",
                "share",
                results.side_lines(labelled),
            )
        elif kind == "rate":
            lines = _over(table, entries, found, [load.per_minute for load in table.loads.values()])
            title = f"Deadlines kept, {mix}, scale 1.5"
            drawn[f"degrees_rate_{mix}"] = Chart(title, "pictures a minute", "share", lines)
        elif kind == "steps between decisions":
            lines = {
                column: [
                    (float(steps), _mean(found.of(entry, load)))
                    for steps, entry in zip(BETWEEN, table.entries.values(), strict=True)
                ]
                for column, load in table.loads.items()
            }
            drawn["degrees_steps_between"] = Chart(
                "Deadlines kept", "steps between decisions", "share", lines
            )
        elif kind == "parts":
            drawn["degrees_parts"] = _parts(table, found)
    return drawn


def _parts(table: Table, found: Simulated) -> Chart:
    """Ours without each of its parts, over the workloads in their order."""
    names = [name for name in table.entries if name == "ours" or name.startswith(("without", "late"))][:7]
    loads = list(table.loads.values())
    lines = {
        name: [(float(place), _mean(found.of(table.entries[name], load))) for place, load in enumerate(loads)]
        for name in names
    }
    return Chart("Deadlines kept without parts of the rule", ", ".join(table.loads), "share", lines)


def _over(
    table: Table, entries: Mapping[str, PoolEntry], found: Simulated, places: Sequence[float]
) -> dict[str, Points]:
    lines: dict[str, Points] = {
        name: [
            (x, _mean(found.of(entry, load))) for x, load in zip(places, table.loads.values(), strict=True)
        ]
        for name, entry in entries.items()
    }
    bounds = [found.bound(load) for load in table.loads.values()]
    return lines | {BOUND: list(zip(places, bounds, strict=True))}


def _mean(runs: Sequence[PoolRun]) -> float:
    return fmean(run.summary.attainment for run in runs)


def main() -> None:
    """Print and write ``out/bench/degrees.json``, ``degrees.md`` and charts."""
    options = parsed(
        __doc__,
        [
            option("--seeds", type=int, default=5, help="runs of each kind, with requests of their own"),
            option("--requests", type=int, default=300, help="of a run"),
            option("--only", type=Several(str), default="", help="tables whose names begin so, with commas"),
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
    found = simulate(chosen, range(options.seeds), options.processes)
    rows = [row for table in chosen for row in rows_of(table, found)]
    report.write(
        "degrees",
        rows,
        workload={
            "devices": DEVICES,
            "machine": "h100-eager, derived",
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
    text = "\n".join(markdown(table, found) for table in chosen)
    (report.OUT / "degrees.md").write_text(text, encoding="utf-8")
    print(text)
    for name, chart in charts(chosen, found).items():
        (report.OUT / f"{name}.svg").write_text(svg(figure(chart)), encoding="utf-8")


if __name__ == "__main__":
    main()
