"""The runs of ``giornata simulate``: progress, tables, files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from giornata.scheduling.policies import PolicyName
from giornata_tools.bars import counting
from giornata_tools.cli.simulate.setting import scenario_of
from giornata_tools.cli.simulate.table import named, table
from giornata_tools.simulation.results import Moment, Simulated, charts
from giornata_tools.simulation.scenario import Scenario, fewest_workers
from giornata_tools.simulation.simulator import Binding, RunOptions

WIDTH: Final = 150
"""Columns of a table that is not printed to a terminal."""


def run(given: Mapping[str, Any]) -> None:
    """Simulate, print, write.

    Raises:
        ValueError: what was asked for cannot be simulated.
    """
    scenario = scenario_of(given)
    if given["find_workers"]:
        _answer(scenario, given)
        return
    rates = [0.0] if scenario.arriving.trace else given["rate"]
    runs: list[Simulated] = []
    for rate in rates:
        for seed in range(1, given["seeds"] + 1):
            jobs = scenario.jobs(rate, seed)
            warmup_s = scenario.arriving.warmup_s
            bound = scenario.bound(jobs) if given["bound"] else None
            p95_s = bound.percentile(95, warmup_s=warmup_s) if bound else None
            mean_s = bound.mean(warmup_s=warmup_s) if bound else None
            for policy in given["policies"]:
                with counting(f"{policy}, {named(rate)}, seed {seed}", len(jobs)) as progress:
                    made = scenario.run(jobs, _options(given, policy, seed), progress)
                runs.append(Simulated(policy, rate, seed, made, scenario.summary(made), p95_s, mean_s))
    _console().print(table(runs))
    if given["out"] is not None:
        _write(given["out"], runs, given, scenario)


def _tell(count: int, seconds: float) -> None:
    Console(stderr=True).print(f"{count} workers: {seconds:.2f} s")


def _options(given: Mapping[str, Any], policy: str, seed: int) -> RunOptions:
    return RunOptions(
        policy=PolicyName(policy),
        binding=Binding(given["binding"]),
        telemetry_hz=given["telemetry_hz"],
        looked_at=given["looked_at"],
        by_deadline=policy == PolicyName.DEADLINE_AWARE,
        seed=seed,
    )


def _answer(scenario: Scenario, given: Mapping[str, Any]) -> None:
    """For each policy and rate, how few workers are enough."""
    percent, slo_s = given["percentile"], given["slo"]
    drawn = Table(title=f"Fewest workers with P{percent:g} within {slo_s:g} s")
    for column in ("policy", "jobs a second", "workers", f"P{percent:g} s", "with one fewer"):
        drawn.add_column(column)
    answers = []
    for rate in [0.0] if scenario.arriving.trace else given["rate"]:
        for policy in given["policies"]:
            found = fewest_workers(
                scenario,
                rate,
                _options(given, policy, 1),
                slo_s=slo_s,
                percent=percent,
                seeds=range(1, given["seeds"] + 1),
                tell=_tell,
            )
            best = found.workers
            shown = (
                (str(best), f"{found.tried[best]:.2f}", f"{found.tried[best - 1]:.2f}" if best > 1 else "")
                if best is not None
                else ("more than 1000", "", "")
            )
            drawn.add_row(policy, named(rate), *shown)
            tried = {str(count): round(seconds, 4) for count, seconds in sorted(found.tried.items())}
            answers.append({"policy": policy, "rate": rate, "workers": best, "tried": tried})
    _console().print(drawn)
    if given["out"] is not None:
        _save(
            given["out"],
            {"workers.json": json.dumps({"slo_s": slo_s, "percentile": percent, "answers": answers})},
        )


def _write(folder: Path, runs: Sequence[Simulated], given: Mapping[str, Any], scenario: Scenario) -> None:
    from giornata_tools.loadgen.drawing import figure, svg

    warmup_s = scenario.arriving.warmup_s
    rows = [
        {
            "policy": run.policy,
            "rate": run.rate,
            "seed": run.seed,
            **asdict(run.summary),
            "bound_mean_s": run.bound_mean_s,
            "bound_p95_s": run.bound_p95_s,
        }
        for run in runs
    ]
    setting = {name: str(v) if isinstance(v, Path) else v for name, v in given.items() if _plain(v)}
    queues = [
        {
            "policy": r.policy,
            "rate": r.rate,
            "seed": r.seed,
            "moments": [list(_moment(m)) for m in r.run.moments],
        }
        for r in runs
    ]
    files = {
        "report.json": json.dumps({"setting": setting, "runs": rows, "queues": queues}, indent=1) + "\n",
        "runs.csv": _csv(rows),
        "jobs.csv": _csv([row for run in runs for row in _jobs(run)]),
        **{name: svg(figure(chart)) for name, chart in charts(runs, warmup_s).items()},
    }
    _save(folder, files)


def _moment(moment: Moment) -> Iterator[float]:
    yield from (moment.at_s, moment.waiting, moment.unfinished)


def _plain(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float, bool, list, Path))


def _jobs(run: Simulated) -> Iterator[dict[str, object]]:
    """Every job, in the order of their arrival."""
    for ended in sorted(run.run.ended, key=lambda e: e.job.at_s):
        shape = ended.job.demand.shapes[0]
        yield {
            "policy": run.policy,
            "rate": run.rate,
            "seed": run.seed,
            "job": ended.job.job_id,
            "arrived_s": round(ended.job.at_s, 4),
            "assigned_s": round(ended.assigned_s, 4),
            "denoised_s": round(ended.denoised_s, 4),
            "ended_s": round(ended.ended_s, 4),
            "worker": ended.worker,
            "pictures": ended.job.demand.rows,
            "steps": shape.steps,
            "computed_tokens": shape.computed,
            "template": ended.job.demand.template,
        }


def _csv(rows: Sequence[Mapping[str, object]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _save(folder: Path, files: Mapping[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{folder} could not be written: {error.strerror}.") from error
    click.echo(f"written to {folder}: {', '.join(files)}")


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)
