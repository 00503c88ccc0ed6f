"""``giornata simulate``: how a cluster would serve a workload, on a virtual clock."""

from __future__ import annotations

from typing import Any

import click

from giornata.scheduling.policies import LOAD_WEIGHT
from giornata.scheduling.rock import AdapterPlan
from giornata_lab.cli import workload
from giornata_lab.loadgen import workload as facts
from giornata_lab.simulation.baselines import PLANNERS, SimPolicy
from giornata_lab.simulation.options import QueueOrder
from giornata_tools.cli import extras
from giornata_tools.cli.options import ABOVE_0, AT_LEAST_0, COUNT, READABLE, folder_option


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
    help="What a worker is: h800-flux (published), flashps-flux (FlashPS's own), h100 and h100-eager (derived), or a "
    "file of `giornata profile`.",
)
@click.option("--rows", type=COUNT, default=8, help="Rows that share a step, at most.")
@click.option("--noise", type=AT_LEAST_0, default=0.0, help="Coefficient of variation of equal steps' times.")
@click.option(
    "--cluster",
    type=READABLE,
    metavar="FILE",
    help="Groups of workers that differ, in TOML or JSON, instead of --workers, --machine, --rows and --noise.",
)
@workload.rate_option(default="4", help="Jobs a second, of all workers together; a run for each.")
@click.option(
    "--cv",
    type=AT_LEAST_0,
    default=1.0,
    help=f"Of the times between jobs: standard deviation over mean; 1 is Poisson, a real trace has {facts.BURSTS:g}.",
)
@workload.trace_option(help=f"Replay a .csv or .jsonl file: {workload.TRACE}.")
@workload.speed_option
@workload.duration_option(default=600.0, help="Virtual, after the warm-up.")
@workload.warmup_option(default=30.0, help="Jobs that arrive in it are not counted.")
@workload.masks_option
@workload.steps_option(help="A number, or production's mix.")
@workload.images_option(help="Pictures a job asks for: a number, or production's mix.")
@click.option("--tokens", type=COUNT, default=4096, help="Of a picture; 4096: 1024 x 1024.")
@click.option("--text-tokens", type=click.IntRange(min=0), default=512, help="Of a prompt.")
@click.option(
    "--padding-tokens",
    type=click.IntRange(min=0),
    default=0,
    help="Of these, those that workers keep from step to step, as GIORNATA_REUSE_TEXT=padding does.",
)
@click.option(
    "--halo", type=click.IntRange(min=0), default=0, help="Tokens around a mask that are computed too."
)
@click.option("--corrects/--no-corrects", default=False, help="Edits compute their first step in full.")
@click.option("--reuse/--no-reuse", default=True, help="Whether edits take from templates.")
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
    type=click.Choice([str(AdapterPlan.OFF), *map(str, PLANNERS)]),
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
    "--line",
    type=click.Choice([str(name) for name in QueueOrder]),
    help="Whose turn comes next; default: as the policy has it.",
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
@click.option(
    "--registered",
    is_flag=True,
    help="Templates are recorded at their first edit on a worker, not the second.",
)
@workload.read_option(
    "--policy",
    "policies",
    parse=_policies,
    default="all",
    metavar="NAME[,NAME...]",
    help=f"all, or of {', '.join(SimPolicy)}.",
)
@click.option(
    "--binding",
    type=click.Choice(["late", "arrival"]),
    help="When a job gets its worker: once that has a place, as live; or at its arrival, as RROD and LRUMS do. "
    "Default: as the policy has it.",
)
@click.option(
    "--looked-at", type=COUNT, default=16, help="Of many workers, how many the policy is asked about."
)
@click.option("--telemetry-hz", type=ABOVE_0, default=4.0, help="How often workers tell of themselves.")
@click.option("--encode-ms", type=AT_LEAST_0, default=0.0, help="Before denoising, a job.")
@click.option(
    "--finish-ms", type=AT_LEAST_0, default=253.0, help="After denoising, a picture; an H800's VAE decode."
)
@click.option("--prepost", type=COUNT, default=8, help="Servers that encode, and as many that finish.")
@click.option(
    "--hops-ms",
    type=AT_LEAST_0,
    default=0.0,
    help="Time that messages and files of a job take, in which no worker computes.",
)
@click.option(
    "--relay-ms",
    type=AT_LEAST_0,
    default=0.0,
    help="That gateway, router and message servers compute, a job, one after the other.",
)
@click.option(
    "--cores",
    type=ABOVE_0,
    help="That all who compute share, a thread each, as on one host without GPUs; default: everyone has one.",
)
@click.option("--slo", type=ABOVE_0, metavar="SECONDS", help="Within which every job should end.")
@click.option(
    "--seeds", type=click.IntRange(1, 100), default=1, help="Runs of each kind, with jobs of their own."
)
@click.option("--bound/--no-bound", default=True, help="Compare with what no schedule could beat.")
@click.option(
    "--find-workers", is_flag=True, help="Answer how few workers keep --percentile of latencies within --slo."
)
@click.option("--percentile", type=click.FloatRange(1, 100), default=95.0, help="For --find-workers.")
@folder_option("-o", "--out", help="Write report.json, runs.csv, jobs.csv and charts there.")
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
    from giornata_lab.cli.simulate.run import run

    read = {name: v.value if isinstance(v, workload.ParsedOption) else v for name, v in given.items()}
    try:
        run(read)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
