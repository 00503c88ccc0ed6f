"""Edits a second at full batches: diffusers' static batching beside the engine, on the same edits.

Two tables. *Equal steps*: a batch of eight with the production trace's masks; the ratio is held against the token
limit (T + L) / (T + M), T text tokens, L of the picture, M computed ones with the halo, and against what remains of it
where the first step is computed in full. With `--padding` steps after the first one compute so much less of T. *Mixed
steps*: edits that all wait at the beginning, with step counts of `MIXES`; static batching pads every batch to its
longest edit, or forms batches of equal counts. Denoising only, in both tables: prompts come as embeddings and pictures
as latents on both sides, and no autoencoder runs. `--family flux2-klein` is an edit by FLUX.2 Klein, whose clean
picture is denoised beside it: T + L is T + 2 L there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import click

from giornata.planning.cost_model import refresh_interval
from giornata.scheduling.batch import BatchingMode
from giornata_denoiser.config import DenoiserConfig
from giornata_lab.bench.compute import engines
from giornata_lab.bench.compute.engines import BenchSetting
from giornata_lab.bench.compute.models import autoencoder, described
from giornata_lab.bench.compute.rows import Rows, changed
from giornata_lab.bench.compute.static_batching import (
    KLEIN,
    KleinStaticBatching,
    StaticBatching,
    in_batches,
    in_equal_batches,
)
from giornata_lab.bench.compute.workload import MIXES, WorkloadEdit, edits, token_limit
from giornata_lab.bench.harness import clock_of, compared, in_turns, write
from giornata_lab.bench.options import FLUX, padding_option, rows_of, shared
from giornata_lab.flags import Several, option, parsed

System = Callable[[], object]
STATIC: Final = "static batching, padded"
REUSE: Final = "ours, reuse"
UNCORRECTED: Final = "ours, reuse without correction"
"""As in FlashPS: no step is computed in full."""
TAUGHT: Final = "ours, reuse, mask seen before"
"""With the correction of an earlier edit: no step is computed in full either."""
MISSED: Final = "ours, no template"
"""One step in so many is computed in full, and the others take what it made of the outside tokens."""
RENEW_STEPS: Final = DenoiserConfig.renew_steps


class Limits(NamedTuple):
    """What computing fewer tokens can gain at most."""

    tokens: float
    """The limit where every step computes fewer tokens."""
    some_in_full: float | None = None
    """Where the first step, or some, compute all of them; None for who computes none so."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/throughput.json``."""
    options = parsed(
        __doc__,
        [
            *shared(tokens=256, text=32, repeats=2),
            padding_option(),
            option(
                "--family",
                type=click.Choice([FLUX, KLEIN]),
                default=FLUX,
                help="Klein is mid-size, or published with --model real",
            ),
            option("--batch", type=Several(int), default=[engines.ROWS], help="rows of a step"),
            option("--steps", type=int, default=7, help="of the equal-steps table"),
            option("--edits", type=int, default=16, help="of the mixed-steps table"),
            option(
                "--mixes",
                type=Several(click.Choice(list(MIXES))),
                default=["8/20/28/50"],
                help="of step counts",
            ),
            option("--divide", type=int, default=4, help="mixed step counts by this, so that runs are short"),
            option("--templates", type=int, default=2, help="distinct pictures"),
        ],
        arguments,
    )
    rows = rows_of(options)
    family = rows.family
    static: StaticBatching | KleinStaticBatching
    if options.family == KLEIN:
        static = KleinStaticBatching(rows, published=options.model == "real")
    else:
        static = StaticBatching(rows, autoencoder(family.dtype, family.device))
    tables = [_equal(rows, static, options, batch) for batch in options.batch]
    tables += [_mixed(rows, static, options, batch, mix) for batch in options.batch for mix in options.mixes]
    workload = {
        **vars(options),
        "model": described(family),
        "setting": rows.setting.as_dict(),
        "template_mib": round(rows.template(0).size_bytes / 2**20, 1),
        "step_mixes": {name: dict(MIXES[name]) for name in options.mixes},
        "masks": "squares of the production trace's ratios, one of each equal share of it",
        "scope": "denoising: embeddings and latents given, autoencoder excluded on both sides",
    }
    write("throughput", [line for table in tables for line in table], workload=workload)


def _equal(
    rows: Rows, static: StaticBatching | KleinStaticBatching, options: SimpleNamespace, batch: int
) -> list[dict[str, Any]]:
    drawn = edits(batch, {options.steps: 1.0}, templates=options.templates, seed=options.seed)
    systems: dict[str, System] = {
        STATIC: lambda: static.denoised(drawn, options.steps),
        "ours, reuse off": _engine(rows, drawn, batch, reuse=False),
        UNCORRECTED: _engine(rows, drawn, batch, reuse=True, setting=BenchSetting(corrected=False)),
        REUSE: _engine(rows, drawn, batch, reuse=True),
        TAUGHT: _engine(rows, drawn, batch, reuse=True, taught=True),
        MISSED: _engine(rows, drawn, batch, reuse=True, missed=True),
    }
    times = _times(systems, rows, options, warm_up=1)
    limits = _limits(rows, drawn, options.steps)
    return _lines(f"equal, {options.steps}, {batch} rows", len(drawn), times, STATIC, limits)


def _limits(rows: Rows, drawn: Sequence[WorkloadEdit], steps: int) -> dict[str, Limits]:
    """Of edits of equal steps; what lies beside a picture is computed in full steps alone."""
    computed = [rows.computed(edit) for edit in drawn]
    whole = rows.row(drawn[0], reuse=False).block_tokens
    limit = token_limit(rows.text_tokens, whole, computed, rows.padding_tokens)
    first_in_full = steps / (1 + (steps - 1) / limit)
    begun = steps / (1 / token_limit(rows.text_tokens, whole, computed) + (steps - 1) / limit)
    renewals = math.ceil(steps / refresh_interval(steps, RENEW_STEPS))
    return {
        UNCORRECTED: Limits(begun),
        REUSE: Limits(begun, first_in_full),
        TAUGHT: Limits(begun),
        MISSED: Limits(limit, steps / (renewals + (steps - renewals) / limit)),
    }


def _mixed(
    rows: Rows,
    static: StaticBatching | KleinStaticBatching,
    options: SimpleNamespace,
    batch: int,
    mix: str,
) -> list[dict[str, Any]]:
    drawn = edits(
        options.edits, MIXES[mix], templates=options.templates, seed=options.seed, divide=options.divide
    )

    def padded() -> None:
        for together, steps in in_batches(drawn, batch):
            static.denoised(together, steps)

    def grouped() -> None:
        for together, steps in in_equal_batches(drawn, batch):
            static.denoised(together, steps)

    systems: dict[str, System] = {
        STATIC: padded,
        "static batching, equal counts": grouped,
        "request-level, reuse": _engine(rows, drawn, batch, reuse=True, joining=BatchingMode.REQUEST),
        "ours, reuse off": _engine(rows, drawn, batch, reuse=False),
        REUSE: _engine(rows, drawn, batch, reuse=True),
    }
    times = _times(systems, rows, options, warm_up=0)  # the other table has warmed it up
    return _lines(f"mixed, {mix}, {batch} rows", len(drawn), times, STATIC, {})


def _engine(
    rows: Rows,
    drawn: Sequence[WorkloadEdit],
    batch: int,
    *,
    reuse: bool,
    taught: bool = False,
    missed: bool = False,
    **how: Any,
) -> System:
    """The engine as it is, or changed by the switches of :func:`giornata_lab.bench.compute.engines.engine_with`."""
    made = [rows.row(edit, reuse=reuse) for edit in drawn]
    if missed:
        every = [refresh_interval(row.steps, RENEW_STEPS) for row in made]
        made = [changed(row, template=None, renewed_every=n) for row, n in zip(made, every, strict=True)]
    if taught:
        with engines.engine_with(rows.family, rows=batch, **how) as engine:
            made = engines.taught(engine, made)

    def run() -> None:
        with engines.engine_with(rows.family, rows=batch, **how) as engine:
            engines.drained(engine, made)

    return run


def _times(
    systems: dict[str, System], rows: Rows, options: SimpleNamespace, *, warm_up: int
) -> dict[str, list[float]]:
    clock, device = clock_of(options), rows.family.device
    return in_turns(systems, options.repeats, clock=clock, device=device, warm_up=warm_up)


def _lines(
    steps: str, count: int, times: dict[str, list[float]], baseline: str, limits: dict[str, Limits]
) -> list[dict[str, Any]]:
    """A line a system: how many times the baseline's edits a second, then the figures."""
    lines = []
    for name, taken in times.items():
        found = compared("ratio", times[baseline], taken)
        tokens, some_in_full = limits.get(name) or (None, None)
        lines.append(
            {
                "steps": steps,
                "system": name,
                **found,
                "edits/s": round(1e3 * count / statistics.median(taken), 4),
                "limit": _over(tokens, 1),
                "of the limit": _over(found["ratio"], tokens),
                "limit, some in full": _over(some_in_full, 1),
                "of the limit, some in full": _over(found["ratio"], some_in_full),
                "note": "slower than the baseline" if found["ratio"] < 1 else "",
            }
        )
    return lines


def _over(value: float | None, by: float | None) -> float | str:
    """Rounded; empty where there is nothing to be said."""
    return "" if value is None or by is None else round(value / by, 3)


if __name__ == "__main__":
    main()
