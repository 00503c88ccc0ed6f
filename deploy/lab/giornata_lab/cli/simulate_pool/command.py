"""``giornata simulate-pool``: how a pool of devices would keep deadlines, on a virtual clock."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import click

from giornata_lab.cli import workload
from giornata_lab.loadgen import workload as facts
from giornata_tools.cli import extras
from giornata_tools.cli.options import AT_LEAST_0, COUNT, folder_option, typed

RULES: Final = ("replanning", "events", "rounds", "deadline", "resolution", "fixed")
DEGREES: Final = (1, 2, 3, 4, 6, 8)
PARTS: Final = ("waits", "widens", "shares", "ageing", "short_steps")
ROUND_PARTS: Final = ("placement", "scale_up", "fill", "idle_start", "whole_steps")
NONE: Final = "none"
OWN: Final = "own"
OF_RULES: Final = {
    "without": "replanning",
    "steps_between": "replanning",
    "every_subset": "replanning",
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
    "--steps-between",
    parse=_counts(1),
    default="1",
    metavar="N[,N...]",
    help="Steps that follow a decision of replanning without another one.",
)
@click.option("--every-subset", is_flag=True, help="Replanning also where all subsets have a group.")
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
      giornata simulate-pool --rule replanning --without all --steps-between 1,2,5,10
    """  # noqa: D301 - click's mark of lines that are not wrapped
    if given["out"] is not None:
        extras.require("bench", "lab")
    read = {name: v.value if isinstance(v, workload.ParsedOption) else v for name, v in given.items()}
    _check(read, typed(ctx))
    from giornata_lab.cli.simulate_pool.run import run

    try:
        run(read)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def _check(given: dict[str, Any], named: set[str]) -> None:
    """Refuse options that nothing would read."""
    for name, rule in OF_RULES.items():
        if name in named and rule not in given["rules"]:
            raise click.UsageError(f"{_options({name})} is of {rule}, which --rule does not name.")
    if given["masks"] and "mixes" in named:
        raise click.UsageError("--masks draws sizes evenly, of 512, 1024 and 2048; it takes no --mix.")
    if given["in_full"] and not given["masks"]:
        raise click.UsageError("--in-full is of edits; it needs --masks.")
    for name in ("rules", "mixes"):
        if not given[name]:
            raise click.UsageError(f"{_options({name})} names none; accepted are one and more, and all.")
    if not any(degree <= given["devices"] for degree in given["degrees"] or [1]):
        raise click.UsageError(
            f"{given['devices']} devices have none of the degrees {', '.join(map(str, given['degrees']))}."
        )


def _options(names: set[str]) -> str:
    called = {"rules": "rule", "mixes": "mix", "scales": "scale"}
    return ", ".join(sorted(f"--{called.get(name, name).replace('_', '-')}" for name in names))
