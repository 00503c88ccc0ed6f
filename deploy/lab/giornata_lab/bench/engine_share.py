"""What the engine adds to computing: its steps in full beside diffusers' own, masked ones beside the forward alone.

``python -m giornata_lab.bench.engine_share`` prints the ratio engine ÷ alone for batches in their middle steps: every
row has its corrections, and none joins or leaves. Masks are production's. Alone is, in full, diffusers' transformer,
scheduler and blend on the whole batch; masked, the network's forward with keys and values at hand. An engine's step
also plans, loads what the next entry needs, makes the schedule's step and judges what it has made: `median` is of the
common step, `of sums` counts those in which the entry changes too. Both take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import click
import torch

from giornata.packed.compute_set import BlockInputs, CachedTokens
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.engine.batch_tensors import assemble
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute import engines, families
from giornata_lab.bench.compute.diffusers_steps import DiffusersStep
from giornata_lab.bench.compute.models import described, transformer_of
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.bench.compute.workload import WorkloadEdit, edits
from giornata_lab.bench.options import FLUX, clock_of, family_option, rows_of, shared
from giornata_lab.bench.reporting.report import wait_for, write
from giornata_lab.flags import Several, option, parsed

MASKED: Final = "masked"
BATCHES: Final = ("in full", MASKED)
EQUAL: Final = {torch.float32: 1e-4}
"""Largest difference of predictions, relative to the largest value."""
ROUGHLY: Final = 2e-2
"""The same in half precision."""
WARM_UP: Final = 2
"""Steps: the first assembles the batch."""


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            *shared(tokens=256, text=32, repeats=20),
            family_option(),
            option("--rows", type=Several(int), default=[1, 8], help="of a batch"),
            option("--batches", type=Several(click.Choice(BATCHES)), default=list(BATCHES)),
            option("--steps", type=int, default=28, help="of every row"),
        ],
        arguments,
    )


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/engine_share.json``."""
    options = options_of(arguments)
    rows = rows_of(options)
    lines: list[dict[str, Any]] = []
    for count in options.rows:
        mix = edits(count, {options.steps: 1.0}, templates=2, seed=options.seed)
        lines += [_line(name, count, rows, options, mix, reuse=name == MASKED) for name in options.batches]
    write("engine_share", lines, workload={**vars(options), "model": described(rows.family)})


def _line(
    name: str, count: int, rows: Rows, options: SimpleNamespace, mix: Sequence[WorkloadEdit], *, reuse: bool
) -> dict[str, Any]:
    batch = [rows.row(edit, reuse=reuse) for edit in mix]
    alone = _forward_alone(rows, batch) if reuse else _diffusers_step(rows, batch, mix, options)
    ours, theirs = _in_turns(rows, options, batch, alone)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "batch": name,
        "rows": count,
        "median": round(statistics.median(ratios), 3),
        "spread": f"{min(ratios):.2f}-{max(ratios):.2f}",
        "of sums": round(sum(ours) / sum(theirs), 3),
        "engine ms": round(statistics.median(ours), 1),
        "alone ms": round(statistics.median(theirs), 1),
    }


def _in_turns(
    rows: Rows, options: SimpleNamespace, batch: Sequence[Row], alone: Callable[[], object]
) -> tuple[list[float], list[float]]:
    """Milliseconds of the engine's steps and of `alone`."""
    clock, device = clock_of(options), rows.family.device
    ours: list[float] = []
    theirs: list[float] = []
    while len(ours) < options.repeats:
        with _running(rows, batch) as engine:
            for step in range(min(options.steps - 1, WARM_UP + options.repeats - len(ours))):
                times = [_timed(call, clock, device) for call in (engine.step, alone)]
                if step >= WARM_UP:
                    for into, took_ms in zip((ours, theirs), times, strict=True):
                        into.append(took_ms)
    return ours, theirs


def _timed(call: Callable[[], object], clock: Callable[[], float], device: torch.device) -> float:
    wait_for(device)
    began = clock()
    call()
    wait_for(device)
    return (clock() - began) * 1e3


@contextmanager
def _running(rows: Rows, batch: Sequence[Row]) -> Iterator[Engine]:
    """An engine with `batch` at its first step, corrections known where rows take from a template."""
    with engines.engine_with(rows.family, rows=len(batch)) as teacher:
        known = engines.taught(teacher, batch) if batch[0].template is not None else list(batch)
    with engines.engine_with(rows.family, rows=len(batch)) as engine:
        engine.batch.submit(known)
        yield engine


def _forward_alone(rows: Rows, batch: Sequence[Row]) -> Callable[[], object]:
    """The network's forward of masked rows, each with the keys and values of its first entry at hand."""
    family = rows.family
    assembly = assemble(family, batch)
    latents = torch.cat([row.latent for row in batch]).to(family.device)
    uses = []
    for row in batch:
        if row.region is None or row.template is None:
            raise ValueError("a mask leaves nothing to be reused; ask for a larger picture")
        entry = row.template.entries[0]
        own = row.own_tokens[0]
        slabs = Slabs(entry, row.region, own, family, device=device_for(family.device, engines.DEVICE_BYTES))
        uses.append(BlockInputs(CachedTokens(entry.modes, slabs)))
    steps = [0] * len(batch)
    return lambda: family.network.predict(assembly.batch, latents, assembly.conditioning, steps, uses=uses)


def _diffusers_step(
    rows: Rows, batch: Sequence[Row], mix: Sequence[WorkloadEdit], options: SimpleNamespace
) -> DiffusersStep:
    """One step of the family's own pipeline; it must predict what the engine's forward predicts."""
    family = rows.family
    if options.family == FLUX:
        module = transformer_of(family)
    else:
        module = families.module(options.family, dtype=family.dtype, device=family.device)
    theirs = DiffusersStep(options.family, module, family, batch, [rows.text(edit.template) for edit in mix])
    assembly = assemble(family, batch)
    latents = torch.cat([row.latent for row in batch]).to(family.device)
    ours = family.network.predict(assembly.batch, latents, assembly.conditioning, [0] * len(batch))
    predicted = theirs.predicted()
    off = float((ours - predicted).abs().max() / predicted.abs().max())
    equal = EQUAL.get(family.dtype, ROUGHLY)
    if off > equal:
        raise ValueError(f"the engine's prediction is {off:.1e} off diffusers' own; equal is {equal:.0e}")
    return theirs


if __name__ == "__main__":
    main()
