"""The runs of ``giornata simulate-pool``: progress, tables, files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import click
from rich.table import Table

from giornata.scheduling.degrees.pool import DEGREES
from giornata.scheduling.degrees.rule import ReplanningOptions
from giornata_lab.simulation.degrees import results
from giornata_lab.simulation.degrees.baselines import RoundSwitches, TieBreak
from giornata_lab.simulation.degrees.results import PoolRun, standard_error
from giornata_lab.simulation.degrees.rules import (
    POWERS,
    BoundCase,
    PoolRuleCase,
    RuleName,
    RuleSetting,
    bound_of,
    run_case,
)
from giornata_lab.simulation.degrees.workloads import SLO_S, PoolWorkload, SizeMix
from giornata_tools.processes import side_by_side
from giornata_tools.terminal import counting, show, table

LACKING: Final[Mapping[str, Mapping[str, Any]]] = {
    "ageing": {"ages_s": inf},
    "short_steps": {"cap_s": inf},
}
"""What parts of ours that are numbers are without them; the others are false."""


def run(given: Mapping[str, Any]) -> None:
    """Simulate, print, write.

    Raises:
        ValueError: what was asked for cannot be simulated.
    """
    loads = list(_workloads(given))
    cases = [PoolRuleCase(load, rule, given["devices"]) for load in loads for rule in _rules(given)]
    asked = [BoundCase(load, _widest(given), given["devices"]) for load in loads] if given["bound"] else []
    with side_by_side(given["processes"]) as pool, counting("runs", len(cases)) as tell:
        shares = pool.map(bound_of, asked)
        runs = []
        for made in pool.map(run_case, cases):
            runs.append(made)
            tell(len(runs))
        known = {case.workload: share for case, share in zip(asked, shares, strict=True)}
    show(_table(runs, known))
    if given["out"] is not None:
        _write(given["out"], runs, known, given)


def _workloads(given: Mapping[str, Any]) -> Iterator[PoolWorkload]:
    for mix in given["mixes"]:
        for scale in given["scales"]:
            for rate in given["rate"]:
                for seed in range(given["seeds"]):
                    yield PoolWorkload(
                        mix=SizeMix(mix),
                        scale=scale,
                        per_minute=rate,
                        cv=given["cv"],
                        steps=given["steps"],
                        requests=given["requests"],
                        masks=given["masks"],
                        in_full=given["in_full"],
                        saved=given["saved"],
                        seed=seed,
                    )


def _widest(given: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(sorted(given["degrees"])) or DEGREES


def _rules(given: Mapping[str, Any]) -> Iterator[RuleSetting]:
    """The rules, each with the switches that were asked for."""
    for name in map(RuleName, given["rules"]):
        chosen = tuple(sorted(given["degrees"])) or (DEGREES if name is RuleName.REPLANNING else POWERS)
        degrees = tuple(degree for degree in chosen if degree <= given["devices"])
        setting = RuleSetting(name, degrees)
        match name:
            case RuleName.FIXED:
                yield from (RuleSetting(name, (degree,)) for degree in degrees)
            case RuleName.ROUNDS:
                lacking = dict.fromkeys(given["rounds_without"], False)
                switches = replace(RoundSwitches(), ties=TieBreak(given["ties"]), **lacking)
                for steps in given["round_steps"]:
                    yield replace(setting, rounds=switches, round_steps=steps)
            case RuleName.REPLANNING:
                yield from _replanning(setting, given)
            case _:
                yield setting


def _replanning(setting: RuleSetting, given: Mapping[str, Any]) -> Iterator[RuleSetting]:
    setting = replace(setting, parts=ReplanningOptions(ages_s=given["ages_s"]))
    yield from (replace(setting, steps_between=steps) for steps in given["steps_between"])
    for part in given["without"]:
        parts = replace(setting.parts, **LACKING.get(part, {part: False}))
        yield replace(setting, parts=parts, without=part)
    if given["every_subset"]:
        yield replace(setting, every_subset=True)


def _table(runs: Sequence[PoolRun], bounds: results.Bounds) -> Table:
    """Means over seeds."""
    figures = ("kept", "mean", "P50", "P95", "P99", "busy", "moved", *(f"{side}²" for side in SLO_S))
    drawn = table(
        *("mix", "scale", "a minute", "rule", *figures),
        numbers={"scale", "a minute", *figures},
        title="Deadlines kept, ± standard error; latencies in seconds; means over seeds",
    )
    for load in dict.fromkeys(replace(run.workload, seed=0) for run in runs):
        mine = [run for run in runs if replace(run.workload, seed=0) == load]
        where = (load.name, f"{load.scale:g}", f"{load.per_minute:g}")
        for rule in dict.fromkeys(run.rule for run in mine):
            drawn.add_row(*where, rule, *_figures([run for run in mine if run.rule == rule]))
        known = [bounds[run.workload] for run in mine if run.rule == mine[0].rule and run.workload in bounds]
        if known:
            drawn.add_row(*where, results.BOUND, f"{fmean(known):.3f}")
        drawn.add_section()
    return drawn


def _figures(runs: Sequence[PoolRun]) -> list[str]:
    kept = [run.summary.attainment for run in runs]
    sides = results.by_side(outcome for run in runs for outcome in run.outcomes)
    seconds = (
        fmean(getattr(run.summary, name) for run in runs) for name in ("mean_s", "p50_s", "p95_s", "p99_s")
    )
    return [
        f"{fmean(kept):.3f}" + (f" ± {standard_error(kept):.3f}" if len(kept) > 1 else ""),
        *(f"{value:.2f}" for value in seconds),
        f"{fmean(run.summary.busy for run in runs):.0%}",
        f"{fmean(run.summary.moved for run in runs):.1%}",
        *(f"{sides[side]:.3f}" if side in sides else "" for side in SLO_S),
    ]


def _write(folder: Path, runs: Sequence[PoolRun], bounds: results.Bounds, given: Mapping[str, Any]) -> None:
    from giornata_lab.loadgen.drawing import figure, svg

    told = [
        {
            **_kind(run),
            **asdict(run.summary),
            "attainment": run.summary.attainment,
            "bound": bounds.get(run.workload),
            "by_side": results.by_side(run.outcomes),
        }
        for run in runs
    ]
    setting = {name: str(v) if isinstance(v, Path) else v for name, v in given.items()}
    flat = [{name: value for name, value in row.items() if name != "by_side"} for row in told]
    files = {
        "report.json": json.dumps({"setting": setting, "runs": told}, indent=1) + "\n",
        "runs.csv": _csv(flat),
        "rows.csv": _csv([row for run in runs for row in _rows(run)]),
        **{name: svg(figure(chart)) for name, chart in results.charts(runs, bounds).items()},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{folder} could not be written: {error.strerror}.") from error
    click.echo(f"written to {folder}: {', '.join(files)}")


def _kind(run: PoolRun) -> dict[str, object]:
    return {"rule": run.rule, **asdict(run.workload)}


def _rows(run: PoolRun) -> Iterator[dict[str, object]]:
    """Every picture, in the order of arrival."""
    load = run.workload
    for outcome in run.outcomes:
        request = outcome.request
        yield {
            "rule": run.rule,
            "mix": load.mix,
            "scale": load.scale,
            "per_minute": load.per_minute,
            "seed": load.seed,
            "row": request.number,
            "side": request.size.side,
            "computed_tokens": request.size.computed,
            "arrived_s": round(request.at_s, 4),
            "due_s": round(request.due_s, 4),
            "ended_s": round(outcome.end_s, 4),
            "met": outcome.met,
            "device_s": round(outcome.device_s, 4),
            "moves": outcome.moves,
            "degrees": " ".join(f"{k}:{n}" for k, n in sorted(outcome.degrees.items())),
        }


def _csv(rows: Sequence[Mapping[str, object]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
