"""The runs of ``giornata simulate``: progress, tables, files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from giornata_lab.cli.simulate.setting import scenario_of
from giornata_lab.simulation.baselines import SimPolicy
from giornata_lab.simulation.options import BindingTime, QueueOrder, RunOptions
from giornata_lab.simulation.results import PolicyRun, SimulationSummary, charts
from giornata_lab.simulation.scenario import Scenario, fewest_workers
from giornata_tools.terminal import counting, show, table

COLUMNS: Final = (
    "jobs/s",
    "policy",
    "mean",
    "P50",
    "P95",
    "P99",
    "gap",
    "utilisation",
    "rows/step",
    "queue",
    "hits",
    "LoRAs near",
    "LoRA wait",
    "LoRAs ready",
    "loads/use",
)
"""Columns of the table of runs."""


def run(given: Mapping[str, Any]) -> None:
    """Simulate, print, write.

    Raises:
        ValueError: what was asked for cannot be simulated.
    """
    scenario = scenario_of(given)
    rates = [0.0] if scenario.arriving.trace else given["rate"]
    if given["find_workers"]:
        _answer(scenario, rates, given)
        return
    runs: list[PolicyRun] = []
    for rate in rates:
        for seed in range(1, given["seeds"] + 1):
            jobs = scenario.jobs(rate, seed)
            warmup_s = scenario.arriving.warmup_s
            bound = scenario.bound(jobs) if given["bound"] else None
            p95_s = bound.percentile(95, warmup_s=warmup_s) if bound else None
            mean_s = bound.mean(warmup_s=warmup_s) if bound else None
            for policy in given["policies"]:
                with counting(f"{policy}, {_named(rate)}, seed {seed}", len(jobs)) as progress:
                    made = scenario.run(jobs, _options(given, policy, seed), progress)
                runs.append(PolicyRun(policy, rate, seed, made, scenario.summary(made), p95_s, mean_s))
    show(_table(runs))
    if given["out"] is not None:
        _write(given["out"], runs, given, scenario)


def _options(given: Mapping[str, Any], policy: str, seed: int) -> RunOptions:
    usual = RunOptions.of(SimPolicy(policy))
    return replace(
        usual,
        adapters=usual.adapters and not given["blind"],
        binding=BindingTime(given["binding"]) if given["binding"] else usual.binding,
        line_name=QueueOrder(given["line"]) if given["line"] else usual.line_name,
        placing=given["placement"] or usual.placing,
        load_weight=given["load_weight"],
        loads_ahead=given["loads_ahead"],
        telemetry_hz=given["telemetry_hz"],
        looked_at=given["looked_at"],
        seed=seed,
    )


def _answer(scenario: Scenario, rates: Sequence[float], given: Mapping[str, Any]) -> None:
    """For each policy and rate, how few workers are enough."""
    percent, slo_s = given["percentile"], given["slo"]
    figures = ("workers", f"P{percent:g} s", "with one fewer")
    title = f"Fewest workers with P{percent:g} within {slo_s:g} s"
    drawn = table("policy", "jobs a second", *figures, numbers=figures, title=title)
    answers, progress = [], Console(stderr=True)
    for rate in rates:
        for policy in given["policies"]:
            found = fewest_workers(
                scenario,
                rate,
                _options(given, policy, 1),
                slo_s=slo_s,
                percent=percent,
                seeds=range(1, given["seeds"] + 1),
                tell=lambda count, seconds: progress.print(f"{count} workers: {seconds:.2f} s"),
            )
            best = found.workers
            shown = ["more than 1000", "", ""]
            if best is not None:
                one_fewer = f"{found.tried[best - 1]:.2f}" if best > 1 else ""
                shown = [str(best), f"{found.tried[best]:.2f}", one_fewer]
            drawn.add_row(policy, _named(rate), *shown)
            tried = {str(count): round(seconds, 4) for count, seconds in sorted(found.tried.items())}
            answers.append({"policy": policy, "rate": rate, "workers": best, "tried": tried})
    show(drawn)
    if given["out"] is not None:
        told = {"slo_s": slo_s, "percentile": percent, "answers": answers}
        _save(given["out"], {"workers.json": json.dumps(told)})


def _table(runs: Sequence[PolicyRun]) -> Table:
    """Means over seeds, with the spread of P95."""
    title = "Latency in seconds; means over seeds, ± half the range"
    drawn = table(*COLUMNS, numbers=set(COLUMNS) - {"policy"}, title=title)
    for rate in dict.fromkeys(run.rate for run in runs):
        for policy in dict.fromkeys(run.policy for run in runs):
            mine = [run for run in runs if (run.rate, run.policy) == (rate, policy)]
            drawn.add_row(_named(rate), policy, *_figures(mine))
        known = [run for run in runs if run.rate == rate and run.bound_p95_s is not None]
        if known:
            mean = fmean(run.bound_mean_s or 0.0 for run in known)
            p95 = fmean(run.bound_p95_s or 0.0 for run in known)
            drawn.add_row(_named(rate), "bound", f"{mean:.2f}", "", f"{p95:.2f}", end_section=True)
    return drawn


def _figures(runs: Sequence[PolicyRun]) -> list[str]:
    def mean(value: Callable[[SimulationSummary], float]) -> float:
        return fmean(value(run.summary) for run in runs)

    p95 = [run.summary.p95_s for run in runs]
    bound = fmean(run.bound_p95_s or 0.0 for run in runs)
    looked_up = mean(lambda s: s.hits_memory + s.hits_disk + s.misses)
    hits = mean(lambda s: s.hits_memory + s.hits_disk)
    return [
        f"{mean(lambda s: s.mean_s):.2f}",
        f"{mean(lambda s: s.p50_s):.2f}",
        f"{fmean(p95):.2f}" + (f" ± {(max(p95) - min(p95)) / 2:.2f}" if len(p95) > 1 else ""),
        f"{mean(lambda s: s.p99_s):.2f}",
        f"{fmean(p95) / bound - 1:+.0%}" if bound else "",
        f"{mean(lambda s: s.utilisation):.0%}",
        f"{mean(lambda s: s.rows_a_step):.2f}",
        f"{mean(lambda s: s.queue_mean):.1f}",
        f"{hits / looked_up:.0%}" if looked_up else "",
        *_of_loras([run.summary for run in runs]),
    ]


def _of_loras(found: Sequence[SimulationSummary]) -> list[str]:
    shares = [one.lora_hit_share for one in found if one.lora_hit_share is not None]
    waits = [one.lora_wait_mean_s for one in found if one.lora_wait_mean_s is not None]
    ready = [one.lora_ready_share for one in found if one.lora_ready_share is not None]
    loads = [one.lora_loads for one in found if one.lora_loads is not None]
    return [
        f"{fmean(shares):.0%}" if shares else "",
        f"{fmean(waits):.2f}" if waits else "",
        f"{fmean(ready):.0%}" if ready else "",
        f"{fmean(loads):.2f}" if loads else "",
    ]


def _named(rate: float) -> str:
    return f"{rate:g}" if rate else "trace"


def _write(folder: Path, runs: Sequence[PolicyRun], given: Mapping[str, Any], scenario: Scenario) -> None:
    from giornata_lab.loadgen.drawing import figure, svg

    rows = [
        {
            **_kind(run),
            **asdict(run.summary),
            "bound_mean_s": run.bound_mean_s,
            "bound_p95_s": run.bound_p95_s,
        }
        for run in runs
    ]
    queues = [
        {**_kind(run), "moments": [[m.at_s, m.waiting, m.unfinished] for m in run.run.moments]}
        for run in runs
    ]
    plain = {name: v for name, v in given.items() if isinstance(v, str | int | float | list | Path | None)}
    setting = {name: str(v) if isinstance(v, Path) else v for name, v in plain.items()}
    drawn = charts(runs, scenario.arriving.warmup_s)
    files = {
        "report.json": json.dumps({"setting": setting, "runs": rows, "queues": queues}, indent=1) + "\n",
        "runs.csv": _csv(rows),
        "jobs.csv": _csv([row for run in runs for row in _jobs(run)]),
        **{name: svg(figure(chart)) for name, chart in drawn.items()},
    }
    _save(folder, files)


def _kind(run: PolicyRun) -> dict[str, object]:
    return {"policy": run.policy, "rate": run.rate, "seed": run.seed}


def _jobs(run: PolicyRun) -> Iterator[dict[str, object]]:
    """Every job, in the order of their arrival."""
    for ended in sorted(run.run.ended, key=lambda e: e.job.at_s):
        shape = ended.job.demand.shapes[0]
        yield {
            **_kind(run),
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
