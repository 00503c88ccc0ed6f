"""What the engine adds to computing: its steps in full beside diffusers' own, masked ones beside the forward alone.

``python -m tests.bench.engine_share`` prints the ratio engine ÷ alone for batches in their middle steps: every row has
its corrections, and none joins or leaves. Masks are production's. Alone is, in full, diffusers' transformer, scheduler
and blend on the whole batch; masked, the network's forward with keys and values at hand. An engine's step also plans,
loads what the next entry needs, makes the schedule's step and judges what it has made: `median` is of the common step,
`of sums` counts those in which the entry changes too. Both take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from giornata.packed.uses import Taken, Use
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.engine.assembly import assemble
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.rows.row import Row
from tests.bench.compute import engines
from tests.bench.compute.models import described, transformer_of
from tests.bench.compute.rows import Rows
from tests.bench.reporting.options import clock_of, rows_of, shared, wait_for
from tests.bench.reporting.report import write
from tests.bench.systems.workload import Edit, edits
from tests.fakes.tiny_flux import SCHEDULER
from tests.flags import Several, option, parsed

WARM_UP: Final = 2
"""Steps: the first assembles the batch."""


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            *shared(tokens=256, text=32, repeats=20),
            option("--rows", type=Several(int), default=[1, 8], help="of a batch"),
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
        lines.append(_line("in full", count, rows, options, mix, reuse=False))
        lines.append(_line("masked", count, rows, options, mix, reuse=True))
    write("engine_share", lines, workload={**vars(options), "model": described(rows.family)})


def _line(
    name: str, count: int, rows: Rows, options: SimpleNamespace, mix: Sequence[Edit], *, reuse: bool
) -> dict[str, Any]:
    batch = [rows.row(edit, reuse=reuse) for edit in mix]
    alone = _forward_alone(rows, batch) if reuse else _diffusers_step(rows, batch)
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
        uses.append(Use(Taken(entry.modes, slabs)))
    steps = [0] * len(batch)
    return lambda: family.network.predict(assembly.batch, latents, assembly.conditioning, steps, uses=uses)


def _diffusers_step(rows: Rows, batch: Sequence[Row]) -> Callable[[], object]:
    """One step of `FluxInpaintPipeline`'s loop over the batch: transformer, scheduler, and the blend after it."""
    family, side = rows.family, rows.side
    transformer = transformer_of(family)
    scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER)
    sigmas = batch[0].track.levels
    scheduler.set_timesteps(sigmas=sigmas[:-1].tolist(), mu=0.5, device=family.device)

    def stacked(name: str) -> Tensor:
        return torch.stack([row.conditioning[name] for row in batch]).to(family.device)

    def text(name: str) -> Tensor:
        parts = [rows.text(index % 2)[name] for index in range(len(batch))]
        return torch.stack(parts).to(family.device, family.dtype)

    latents = torch.stack([row.latent for row in batch]).to(family.device)
    picture, noise, mask = stacked("image_latents"), stacked("noise"), stacked("mask")
    embeds, pooled = text("prompt_embeds"), text("pooled_prompt_embeds")
    guidance = torch.full((len(batch),), 3.5, device=family.device, dtype=torch.float32)
    image_ids = torch.zeros(side, side, 3, device=family.device, dtype=family.dtype)
    image_ids[..., 1] += torch.arange(side, device=family.device)[:, None]
    image_ids[..., 2] += torch.arange(side, device=family.device)[None, :]
    text_ids = torch.zeros(embeds.shape[1], 3, device=family.device, dtype=family.dtype)
    time, then = scheduler.timesteps[0], scheduler.timesteps[1:2]

    def step() -> None:
        velocity = transformer(
            hidden_states=latents,
            timestep=time.expand(len(latents)).to(latents.dtype) / 1000,
            guidance=guidance,
            pooled_projections=pooled,
            encoder_hidden_states=embeds,
            txt_ids=text_ids,
            img_ids=image_ids.reshape(-1, 3),
            return_dict=False,
        )[0]
        scheduler._step_index = 0
        moved = scheduler.step(velocity, time, latents, return_dict=False)[0]
        outside = scheduler.scale_noise(picture, then, noise)
        torch.add((1 - mask) * outside, mask * moved)

    return step


if __name__ == "__main__":
    main()
