"""``giornata simulate``: how a cluster would serve a workload, on a virtual clock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from giornata.planning.cost_model import Profile
from giornata.planning.operations import StepCosts
from giornata.scheduling.policies import LOAD_WEIGHT
from giornata_lab.cli import workload
from giornata_lab.cli.workload import counting
from giornata_lab.loadgen import workload as facts
from giornata_lab.loadgen.outcomes import spread
from giornata_lab.loadgen.traces import busiest_windows, read_trace_file
from giornata_lab.loadgen.workload import (
    AdapterSizes,
    AdapterWorkload,
    ArrivalBursts,
    MaskShape,
    Workload,
    zipf,
)
from giornata_lab.simulation import machines
from giornata_lab.simulation.adapter_plans import AdapterPlan
from giornata_lab.simulation.baselines import SimPolicy
from giornata_lab.simulation.jobs import AdapterDemand, PictureSetting, held_controls
from giornata_lab.simulation.machines import Machine, TemplateStorage
from giornata_lab.simulation.options import RunOptions, StageSetting
from giornata_lab.simulation.residency import AdapterSetting, TemplateSetting
from giornata_lab.simulation.results import PolicyRun, charts, paired
from giornata_lab.simulation.scenario import ArrivalSetting, Scenario, fewest_workers, popular
from giornata_tools.cli import extras
from giornata_tools.cli.options import ABOVE_0, AT_LEAST_0, COUNT, folder_option
from giornata_tools.terminal import show, table


def scenario_of(given: Mapping[str, Any]) -> Scenario:
    """Return what the options say.

    Raises:
        ValueError: a file holds something else than it should.
    """
    weights = zipf(given["templates"], given["zipf"])
    controls = held_controls(round(given["controlnet_gb"] * 1e9)) if given["controlnet_gb"] else ()
    return Scenario(
        machines=tuple(replace(machine, controls=controls) for machine in _machines(given)),
        workload=Workload(
            given["masks"], given["steps"], given["n"], weights, MaskShape.SQUARE, _adapters(given)
        ),
        arriving=_arriving(given),
        picture=PictureSetting(
            given["text_tokens"],
            given["tokens"],
            given["halo"],
        ),
        templates=TemplateSetting(
            size_bytes=given["template_gb"] * 1e9,
            kv_bytes=given["step_gb"] * 1e9,
            preloaded=() if given["cold"] else popular(weights),
        ),
        stages=StageSetting(given["encode_ms"], given["finish_ms"], given["prepost"]),
        asked=AdapterDemand(
            AdapterSizes.between(*given["lora_mb"]) if given["lora_mb"] else AdapterSizes(),
            facts.ADAPTERS[given["adapters"]]["controlnets"] if given["adapters"] else {0: 1.0},
            given["lora_joins_within"],
        ),
        adapters=AdapterSetting(
            given["lora_device_gb"] * 1e9,
            given["lora_memory_gb"] * 1e9,
            given["lora_disk_gb"] * 1e9,
            given["store_gb_per_s"] * 1e9,
            given["disk_gb_per_s"] * 1e9,
            given["link_gb_per_s"] * 1e9,
            store_latency_s=given["store_latency_s"],
            link_latency_s=given["link_latency_s"],
            workers_a_host=given["workers_a_host"],
        ),
        slo_s=given["slo"],
    )


def _machines(given: Mapping[str, Any]) -> list[Machine]:
    name = given["machine"]
    try:
        if name in machines.PUBLISHED:
            machine = machines.PUBLISHED[name]()
        else:
            machine = machines.of_profile(Profile.model_validate_json(Path(name).read_bytes()))
    except (OSError, ValueError) as error:
        known = ", ".join(machines.PUBLISHED)
        raise ValueError(f"--machine is {known} or a file of `giornata profile`; {error}") from error
    costs = machine.costs
    if given["step_gb"]:
        costs = StepCosts(costs.compute, (0.0, 1e-6 / given["link_gb_per_s"]))
    storage = TemplateStorage(given["memory_gb"] * 1e9, given["disk_gb"] * 1e9, given["disk_gb_per_s"] * 1e9)
    alike = replace(machine, costs=costs, rows=given["rows"], storage=storage)
    return [alike] * int(given["workers"])


def _arriving(given: Mapping[str, Any]) -> ArrivalSetting:
    path: Path | None = given["trace"]
    try:
        lines = tuple(read_trace_file(path)) if path else ()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    window_s = given["window"]
    if window_s is not None and path is None:
        raise ValueError("--window needs --trace")
    return ArrivalSetting(
        given["duration"],
        given["warmup"],
        given["cv"],
        ArrivalBursts(given["crowds"]) if given["crowds"] > 1 else None,
        () if window_s else lines,
        given["speed"],
        tuple(busiest_windows(lines, window_s, given["seeds"])) if window_s else (),
    )


def _adapters(given: Mapping[str, Any]) -> AdapterWorkload | None:
    """LoRAs of jobs; None where jobs have none."""
    if given["adapters"] is None:
        return None
    return replace(
        AdapterWorkload.of(given["adapters"], given["loras"]),
        zipf=given["lora_zipf"],
        repetition=given["lora_repetition"],
        drift_s=given["lora_drift_s"],
    )


FIGURES: Final = {
    "mean": ("mean_s", ".2f"),
    "P50": ("p50_s", ".2f"),
    "P95": ("p95_s", ".2f"),
    "P99": ("p99_s", ".2f"),
    "gap": ("", ""),
    "utilisation": ("utilisation", ".0%"),
    "rows/step": ("rows_a_step", ".2f"),
    "queue": ("queue_mean", ".1f"),
    "hits": ("hit_share", ".0%"),
    "LoRAs near": ("lora_hit_share", ".0%"),
    "LoRA wait": ("lora_wait_mean_s", ".2f"),
    "LoRAs ready": ("lora_ready_share", ".0%"),
    "loads/use": ("lora_loads", ".2f"),
}
"""Columns of the table of runs: which figure of their summaries, and how it is shown. `gap` is beside the bound."""


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
            ideal = spread(bound.in_order(warmup_s=warmup_s)) if bound else None
            in_order = (ideal.mean, ideal.p95, ideal.p99) if ideal else None
            for policy in given["policies"]:
                with counting(f"{policy}, {_named(rate)}, seed {seed}", len(jobs)) as progress:
                    made = scenario.run(jobs, _options(given, policy, seed), progress)
                told = scenario.summary(made)
                runs.append(PolicyRun(policy, rate, seed, made, told, p95_s, mean_s, in_order))
    show(_table(runs))
    if given["seeds"] > 1 and len(given["policies"]) > 1:
        show(_comparison(runs))
    if given["out"] is not None:
        _write(given["out"], runs, given, scenario)


def _options(given: Mapping[str, Any], policy: str, seed: int) -> RunOptions:
    usual = RunOptions.of(SimPolicy(policy))
    return replace(
        usual,
        adapters=usual.adapters and not given["blind"],
        placing=AdapterPlan(given["placement"] or usual.placing),
        load_weight=given["load_weight"],
        loads_ahead=given["loads_ahead"],
        telemetry_hz=given["telemetry_hz"],
        seed=seed,
    )


def _answer(scenario: Scenario, rates: Sequence[float], given: Mapping[str, Any]) -> None:
    """For each policy and rate, how few workers are enough."""
    percent, slo_s = 95.0, given["slo"]
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
    drawn = table("jobs/s", "policy", *FIGURES, numbers={"jobs/s", *FIGURES}, title=title)
    for rate in dict.fromkeys(run.rate for run in runs):
        for policy in dict.fromkeys(run.policy for run in runs):
            mine = [run for run in runs if (run.rate, run.policy) == (rate, policy)]
            drawn.add_row(_named(rate), policy, *_figures(mine))
        known = [run for run in runs if run.rate == rate and run.bound_p95_s is not None]
        if known:
            mean = fmean(run.bound_mean_s or 0.0 for run in known)
            p95 = fmean(run.bound_p95_s or 0.0 for run in known)
            ideals = [run.in_order for run in known if run.in_order is not None]
            figures = [f"{fmean(one):.2f}" for one in zip(*ideals, strict=True)]
            drawn.add_row(_named(rate), "in order", *figures[:1], "", *figures[1:])
            drawn.add_row(_named(rate), "bound", f"{mean:.2f}", "", f"{p95:.2f}", end_section=True)
    return drawn


def _comparison(runs: Sequence[PolicyRun]) -> Table:
    """Figures of each policy beside the first one's with the same jobs."""
    figures = {"mean": "mean_s", "P95": "p95_s", "P99": "p99_s"}
    title = f"Beside {runs[0].policy} with the same jobs; mean and 95 % interval over seeds"
    drawn = table("jobs/s", "policy", *figures, numbers=set(figures), title=title)
    for rate in dict.fromkeys(run.rate for run in runs):
        first, *others = dict.fromkeys(run.policy for run in runs)
        mine = {
            name: [run for run in runs if (run.rate, run.policy) == (rate, name)] for name in (first, *others)
        }
        for policy in others:
            found = [paired(mine[policy], mine[first], field) for field in figures.values()]
            drawn.add_row(_named(rate), policy, *(f"{share:+.1%} ± {half:.1%}" for share, half in found))
    return drawn


def _figures(runs: Sequence[PolicyRun]) -> list[str]:
    """Means over seeds; of P95 with half its range, and how far it is above the bound."""
    found = {}
    for name, (field, form) in FIGURES.items():
        values = [value for run in runs if (value := getattr(run.summary, field, None)) is not None]
        found[name] = f"{fmean(values):{form}}" if values else ""
    p95 = [run.summary.p95_s for run in runs]
    if len(p95) > 1:
        found["P95"] += f" ± {(max(p95) - min(p95)) / 2:.2f}"
    if bound := fmean(run.bound_p95_s or 0.0 for run in runs):
        found["gap"] = f"{fmean(p95) / bound - 1:+.0%}"
    return list(found.values())


def _named(rate: float) -> str:
    return f"{rate:g}" if rate else "trace"


def _write(folder: Path, runs: Sequence[PolicyRun], given: Mapping[str, Any], scenario: Scenario) -> None:
    from giornata_lab.loadgen.drawing import figure, svg

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
    plain = {name: v for name, v in given.items() if isinstance(v, str | int | float | list | Path | None)}
    setting = {name: str(v) if isinstance(v, Path) else v for name, v in plain.items()}
    drawn = charts(runs, scenario.arriving.warmup_s)
    files = {
        "report.json": json.dumps({"setting": setting, "runs": rows}, indent=1) + "\n",
        **{name: svg(figure(chart)) for name, chart in drawn.items()},
    }
    _save(folder, files)


def _save(folder: Path, files: Mapping[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{folder} could not be written: {error.strerror}.") from error
    click.echo(f"written to {folder}: {', '.join(files)}")


def _policies(text: str) -> list[str]:
    """Some by their names, each once, or all."""
    known = [str(name) for name in SimPolicy]
    names = known if text == "all" else list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no policy is called {unknown[0]}; there are {', '.join(known)}, and all")
    return names


def _sizes(text: str) -> tuple[float, float] | None:
    """Two sizes in bytes, given in MB with a dash between them; None for none."""
    if not text:
        return None
    try:
        least, most = (float(part) * 1e6 for part in text.split("-"))
    except ValueError:
        least, most = 0.0, 0.0
    if not 1 <= least <= most:
        raise ValueError(f"received {text}; accepted are two sizes in MB, the lesser first, such as 5-200")
    return least, most


@click.command(context_settings={"show_default": True})
@click.option("--workers", type=click.IntRange(1, 1000), default=8, help="Alike workers.")
@click.option(
    "--machine",
    default="h800-flux",
    metavar="NAME|FILE",
    help="What a worker is: h800-flux (published), flashps-flux (FlashPS's own), h100 (derived), or a file of "
    "`giornata profile`.",
)
@click.option("--rows", type=COUNT, default=8, help="Rows that share a step, at most.")
@workload.rate_option(default="4", help="Jobs a second, of all workers together; a run for each.")
@workload.cv_option
@workload.trace_option(help=f"Replay a .csv or .jsonl file: {workload.TRACE}.")
@workload.speed_option
@click.option(
    "--window",
    type=ABOVE_0,
    metavar="SECONDS",
    help="Of the trace, take the times alone: of its busiest windows so long, one a seed, stretched to --rate.",
)
@workload.duration_option(default=600.0, help="Virtual, after the warm-up.")
@workload.warmup_option(default=30.0, help="Jobs that arrive in it are not counted.")
@workload.masks_option
@workload.steps_option(help="A number, or production's mix.")
@workload.images_option(help="Pictures a job asks for: a number, or production's mix.")
@click.option("--tokens", type=COUNT, default=4096, help="Of a picture; 4096: 1024 x 1024.")
@click.option("--text-tokens", type=click.IntRange(min=0), default=512, help="Of a prompt.")
@click.option(
    "--halo", type=click.IntRange(min=0), default=0, help="Tokens around a mask that are computed too."
)
@click.option("--templates", type=COUNT, default=1, help="Distinct pictures.")
@workload.zipf_option
@click.option(
    "--template-gb", type=AT_LEAST_0, default=0.0, help="Of one template; 0: all of them fit anywhere."
)
@click.option("--memory-gb", type=ABOVE_0, default=64.0, help="For templates, of each worker.")
@click.option("--disk-gb", type=AT_LEAST_0, default=0.0, help="For templates on disk, of each worker.")
@click.option("--disk-gb-per-s", type=ABOVE_0, default=2.0, help="At which templates are read from disk.")
@click.option(
    "--step-gb",
    type=AT_LEAST_0,
    default=0.0,
    help="That a row takes a step from memory; 0: loads are neglected.",
)
@click.option(
    "--link-gb-per-s", type=ABOVE_0, default=50.0, help="From memory to the device, where --step-gb says so."
)
@click.option(
    "--adapters",
    type=click.Choice(list(facts.ADAPTERS)),
    help="LoRAs and ControlNets of jobs, as a published service has them; default: none.",
)
@click.option("--loras", type=COUNT, default=facts.LORAS, help="Distinct LoRAs.")
@workload.read_option(
    "--lora-mb",
    parse=_sizes,
    default="",
    metavar="LEAST-MOST",
    help="Sizes of LoRAs, with logarithms spread evenly; default: 341 or 797 MB.",
)
@click.option("--lora-zipf", type=AT_LEAST_0, default=facts.LORA_ZIPF, help="Exponent of their popularity.")
@click.option(
    "--lora-repetition",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="Share of uses that repeat one of the latest eight.",
)
@click.option(
    "--lora-drift-s",
    type=AT_LEAST_0,
    default=0.0,
    help="After so many seconds each time a fifth of the ranks change places; 0: never.",
)
@click.option(
    "--lora-joins-within",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="Share of the steps that may be made before LoRAs are there; 0: exact.",
)
@click.option(
    "--placement",
    type=click.Choice(list(map(str, AdapterPlan))),
    help="Which plan says what hosts and devices load before jobs ask for it; default: as the policy has it.",
)
@click.option(
    "--workers-a-host", type=COUNT, default=1, help="That share memory, disk and the link to the store."
)
@click.option(
    "--store-latency-s", type=AT_LEAST_0, default=0.0, help="Of a load from the store, beside its bytes."
)
@click.option(
    "--link-latency-s", type=AT_LEAST_0, default=0.0, help="Of a load onto a device, beside its bytes."
)
@click.option(
    "--load-weight",
    type=AT_LEAST_0,
    default=LOAD_WEIGHT,
    help="What loads cost that hide behind waiting; live 1.",
)
@click.option(
    "--loads-ahead/--no-loads-ahead", default=True, help="Whether likely workers load while jobs wait."
)
@click.option(
    "--crowds",
    type=click.FloatRange(min=1),
    default=1.0,
    help="Times as many jobs for 45 s, about every 15 minutes.",
)
@click.option(
    "--lora-device-gb", type=AT_LEAST_0, default=2.0, help="For LoRAs on the device of each worker."
)
@click.option("--lora-memory-gb", type=AT_LEAST_0, default=16.0, help="For LoRAs in memory of each worker.")
@click.option("--lora-disk-gb", type=AT_LEAST_0, default=100.0, help="For LoRAs on disk of each worker.")
@click.option(
    "--store-gb-per-s", type=ABOVE_0, default=0.5, help="At which LoRAs come from the LoRA store to a worker."
)
@click.option(
    "--controlnet-gb",
    type=AT_LEAST_0,
    default=0.0,
    help="Weights of a ControlNet that workers compute themselves; 0: others compute all of them.",
)
@click.option(
    "--blind", is_flag=True, help="The router does not know the jobs' adapters; FlashPS's policies never do."
)
@click.option("--cold", is_flag=True, help="No template is in memory at the start.")
@workload.read_option(
    "--policy",
    "policies",
    parse=_policies,
    default="all",
    metavar="NAME[,NAME...]",
    help=f"all, or of {', '.join(SimPolicy)}.",
)
@click.option("--telemetry-hz", type=ABOVE_0, default=4.0, help="How often workers tell of themselves.")
@click.option("--encode-ms", type=AT_LEAST_0, default=0.0, help="Before denoising, a job.")
@click.option(
    "--finish-ms", type=AT_LEAST_0, default=253.0, help="After denoising, a picture; an H800's VAE decode."
)
@click.option("--prepost", type=COUNT, default=8, help="Servers that encode, and as many that finish.")
@click.option("--slo", type=ABOVE_0, metavar="SECONDS", help="Within which every job should end.")
@click.option(
    "--seeds", type=click.IntRange(1, 100), default=1, help="Runs of each kind, with jobs of their own."
)
@click.option("--bound/--no-bound", default=True, help="Compare with what no schedule could beat.")
@click.option(
    "--find-workers", is_flag=True, help="Answer how few workers keep 95 % of latencies within --slo."
)
@folder_option("-o", "--out", help="Write report.json and charts there.")
def simulate(**given: Any) -> None:
    r"""Simulate a cluster: the router's own policies, line and batches on a virtual clock.

    Prints latencies, utilisation and cache hits of each policy on the same jobs, and the gap of its P95 to a lower
    bound: the least time in which any schedule that knows the future could end 95 % of them, were all workers one.

    \b
    Examples:
      giornata simulate --rate 2,3,4 -o out/simulation
      giornata simulate --templates 970 --template-gb 4 --cold --policy finish_time,request_level
      giornata simulate --rate 20 --find-workers --slo 5 --policy finish_time
      giornata simulate --machine .giornata/profile.json --rows 4 --workers 2 --rate 0.5
    """
    if given["find_workers"] and given["slo"] is None:
        raise click.UsageError("--find-workers needs --slo: the seconds that jobs may take.")
    if given["out"] is not None:
        extras.require("bench", "lab")
    read = {name: v.value if isinstance(v, workload.ParsedOption) else v for name, v in given.items()}
    try:
        run(read)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
