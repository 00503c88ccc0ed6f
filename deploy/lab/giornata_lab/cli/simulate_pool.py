"""``giornata simulate-pool``: how a pool of devices would keep deadlines, on a virtual clock."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import click
from rich.table import Table

from giornata.scheduling.degrees.pool import DEGREES
from giornata.scheduling.degrees.rule import ReplanningOptions
from giornata_lab.cli import workload
from giornata_lab.loadgen import workload as facts
from giornata_lab.simulation.degrees.baselines import RoundSwitches, TieBreak
from giornata_lab.simulation.degrees.rules import (
    BOUND,
    POWERS,
    BoundCase,
    Bounds,
    PoolRuleCase,
    PoolRun,
    RuleName,
    RuleSetting,
    bound_of,
    by_side,
    charts,
    run_case,
    standard_error,
)
from giornata_lab.simulation.degrees.workloads import SLO_S, PoolWorkload, SizeMix
from giornata_tools.cli import extras
from giornata_tools.cli.options import AT_LEAST_0, COUNT, folder_option, typed
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
    yield setting
    for part in given["without"]:
        parts = replace(setting.parts, **LACKING.get(part, {part: False}))
        yield replace(setting, parts=parts, without=part)


def _table(runs: Sequence[PoolRun], bounds: Bounds) -> Table:
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
            drawn.add_row(*where, BOUND, f"{fmean(known):.3f}")
        drawn.add_section()
    return drawn


def _figures(runs: Sequence[PoolRun]) -> list[str]:
    kept = [run.summary.attainment for run in runs]
    sides = by_side(outcome for run in runs for outcome in run.outcomes)
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


def _write(folder: Path, runs: Sequence[PoolRun], bounds: Bounds, given: Mapping[str, Any]) -> None:
    from giornata_lab.loadgen.drawing import figure, svg

    told = [
        {
            **_kind(run),
            **asdict(run.summary),
            "attainment": run.summary.attainment,
            "bound": bounds.get(run.workload),
            "by_side": by_side(run.outcomes),
        }
        for run in runs
    ]
    setting = {name: str(v) if isinstance(v, Path) else v for name, v in given.items()}
    flat = [{name: value for name, value in row.items() if name != "by_side"} for row in told]
    files = {
        "report.json": json.dumps({"setting": setting, "runs": told}, indent=1) + "\n",
        "runs.csv": _csv(flat),
        "rows.csv": _csv([row for run in runs for row in _rows(run)]),
        **{name: svg(figure(chart)) for name, chart in charts(runs, bounds).items()},
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


RULES: Final = ("replanning", "events", "rounds", "deadline", "resolution", "fixed")
PARTS: Final = ("waits", "widens", "shares", "ageing", "short_steps")
ROUND_PARTS: Final = ("placement", "scale_up", "fill", "idle_start", "whole_steps")
NONE: Final = "none"
OWN: Final = "own"
OF_RULES: Final = {
    "without": "replanning",
    "ages_s": "replanning",
    "round_steps": "rounds",
    "ties": "rounds",
    "rounds_without": "rounds",
}
"""Options that only one rule reads."""


def _named(known: tuple[str, ...], what: str) -> Callable[[str], list[str]]:
    """Reads names with commas between them, each once."""

    def read(text: str) -> list[str]:
        if text == NONE:
            return []
        names = list(known) if text == "all" else list(dict.fromkeys(text.split(",")))
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"no {what} is called {unknown[0]}; there are {', '.join(known)}, and all")
        return names

    return read


def _counts(least: int, known: tuple[int, ...] = ()) -> Callable[[str], list[int]]:
    """Reads whole numbers with commas between them, each once."""

    def read(text: str) -> list[int]:
        parts = text.split(",")
        found = [int(part) for part in parts if part.isdecimal()]
        if len(found) < len(parts) or any(n < least or (known and n not in known) for n in found):
            accepted = ", ".join(map(str, known)) if known else f"{least} and more"
            raise ValueError(f"received {text}; accepted are {accepted}, with commas between them")
        return list(dict.fromkeys(found))

    return read


def _masks(text: str) -> str | None:
    if text != NONE and text not in facts.MASK_RATIOS:
        raise ValueError(f"no trace is called {text}; there are {', '.join(facts.MASK_RATIOS)}, and none")
    return None if text == NONE else text


# Processes that compute runs side by side.


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


@click.command("simulate-pool", context_settings={"show_default": True})
@click.option("--devices", type=click.IntRange(1, 8), default=8, help="Of the pool.")
@workload.read_option(
    "--rule",
    "rules",
    parse=_named(RULES, "rule"),
    default="replanning,events,rounds,deadline,resolution",
    metavar="RULE[,RULE...]",
    help=f"all, or some of {', '.join(RULES)}; fixed is one for each degree.",
)
@workload.read_option(
    "--degrees",
    parse=lambda text: [] if text == OWN else _counts(1, DEGREES)(text),
    default=OWN,
    metavar="K[,K...]",
    help="That rules may use; own: 1, 2, 3, 4, 6 and 8 for replanning, the powers of two for others.",
)
@workload.read_option(
    "--mix",
    "mixes",
    parse=_named(("uniform", "skewed"), "mix"),
    default="uniform",
    metavar="MIX[,MIX]",
    help="256, 512, 1024 and 2048 pixels a side: uniform, or skewed, with large ones more often; or all.",
)
@workload.read_option(
    "--scale",
    "scales",
    parse=workload.rates,
    default="1.0,1.5",
    metavar="X[,X...]",
    help="Times 1.5, 2, 3 and 5 s: the deadlines.",
)
@workload.rate_option(default="12", help="Pictures a minute; runs for each.")
@click.option(
    "--cv", type=click.FloatRange(min=1), default=1.0, help="Of the times between arrivals; 1 is Poisson."
)
@click.option("--requests", type=COUNT, default=300, help="Pictures of a run.")
@click.option("--steps", type=COUNT, default=50, help="Of a picture.")
@workload.read_option(
    "--masks",
    parse=_masks,
    default=NONE,
    metavar="TRACE",
    help=f"Edits of 512, 1024 and 2048 with masks of {', '.join(facts.MASK_RATIOS)}, or none: whole pictures.",
)
@click.option("--in-full", is_flag=True, help="Compute all tokens of edits in every step.")
@click.option(
    "--saved",
    type=click.FloatRange(0, 0.5),
    default=0.0,
    help="Share of all steps that a cache of similar prompts' latents saves; 0.21 is Nirvana's.",
)
@click.option("--seeds", type=click.IntRange(1, 100), default=1, help="Runs of each kind.")
@workload.read_option(
    "--without",
    parse=_named(PARTS, "part of replanning"),
    default=NONE,
    metavar="PART[,PART...]",
    help=f"Replanning also without one of its parts: all, or some of {', '.join(PARTS)}.",
)
@workload.read_option(
    "--round-steps",
    parse=_counts(1),
    default="5",
    metavar="N[,N...]",
    help="Length of rounds, in steps of 2048 x 2048 on all devices.",
)
@click.option(
    "--ties",
    type=click.Choice(["eager", "fewest"]),
    default="eager",
    help="Of choices of a round that keep as many deadlines: the one that computes more, or has fewest devices.",
)
@workload.read_option(
    "--rounds-without",
    parse=_named(ROUND_PARTS, "part of rounds"),
    default=NONE,
    metavar="PART[,PART...]",
    help=f"Parts that rounds lack: some of {', '.join(ROUND_PARTS)}.",
)
@click.option("--ages-s", type=AT_LEAST_0, default=30.0, help="When replanning puts late pictures first.")
@click.option("--bound/--no-bound", default=True, help="Compare with what no rule could beat.")
@click.option("--processes", type=COUNT, default=os.cpu_count() or 1, help="Runs at the same time.")
@folder_option("-o", "--out", help="Write report.json, runs.csv, rows.csv and charts there.")
@click.pass_context
def simulate_pool(ctx: click.Context, /, **given: Any) -> None:
    """Simulate a pool: deadlines kept, rules, a bound.

    The devices of a pool compute steps together, so that most pictures end in time. They are H100s with step times that
    are derived from published ones. Prints how many deadlines each rule keeps, with the standard error over seeds, and
    latencies in seconds; beside them a bound that knows all arrivals.

    \b
    Examples:
      giornata simulate-pool --mix all --seeds 5 -o out/pool
      giornata simulate-pool --rule replanning,rounds --round-steps 1,2,5 --rate 6,12,18
      giornata simulate-pool --masks production --steps 30 --scale 1.5 --rate 144
      giornata simulate-pool --rule replanning --without all
    """  # noqa: D301 - click's mark of lines that are not wrapped
    if given["out"] is not None:
        extras.require("bench", "lab")
    read = {name: v.value if isinstance(v, workload.ParsedOption) else v for name, v in given.items()}
    _check(read, typed(ctx))
    try:
        run(read)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def _check(given: dict[str, Any], named: set[str]) -> None:
    """Refuse options that nothing would read."""
    for name, rule in OF_RULES.items():
        if name in named and rule not in given["rules"]:
            raise click.UsageError(f"{_named_options({name})} is of {rule}, which --rule does not name.")
    if given["masks"] and "mixes" in named:
        raise click.UsageError("--masks draws sizes evenly, of 512, 1024 and 2048; it takes no --mix.")
    if given["in_full"] and not given["masks"]:
        raise click.UsageError("--in-full is of edits; it needs --masks.")
    for name in ("rules", "mixes"):
        if not given[name]:
            raise click.UsageError(
                f"{_named_options({name})} names none; accepted are one and more, and all."
            )
    if not any(degree <= given["devices"] for degree in given["degrees"] or [1]):
        raise click.UsageError(
            f"{given['devices']} devices have none of the degrees {', '.join(map(str, given['degrees']))}."
        )


def _named_options(names: set[str]) -> str:
    called = {"rules": "rule", "mixes": "mix", "scales": "scale"}
    return ", ".join(sorted(f"--{called.get(name, name).replace('_', '-')}" for name in names))
