"""A picture's time where loading is slow: the exact planner beside greedy, strawman and naive loading.

The loader is throttled so that loading a block's keys and values takes so many times what the block takes with them, as
in figure 9 of FlashPS. Systems: `exact`, `greedy` (the paper's Algorithm 1), `strawman` (every block from the cache,
loaded ahead), `naive` (a step's loads first, then its computing) and `full` (no reuse). All load one step ahead but
`naive`; every step has its own entry. What was predicted stands beside what it took.

Rows `the plan` carry out one plan of the whole picture, made before: the planners' optimum. Rows `the engine` are the
engine's: it plans at every step, with one set of weights for all blocks, and planning is part of the picture's time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import click
import torch

from giornata.packed.compute_set import BlockInputs
from giornata.planning.block_plans import (
    BlockCost,
    LoadLink,
    Modes,
    Planner,
    exact_modes,
    greedy_modes,
    sequential_end_ms,
    timeline,
    uniform_modes,
)
from giornata.wire.values import BlockMode
from giornata_denoiser.blocks.recorders import EntryRecorder
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.engine.batch_tensors import assemble
from giornata_denoiser.engine.denoise_step import denoise_step
from giornata_denoiser.rows.row import RecordingSpec
from giornata_denoiser.rows.template import Entry
from giornata_lab.bench.compute import block_costs, loading_engine
from giornata_lab.bench.compute.loading_engine import LoadTimes
from giornata_lab.bench.compute.loading_run import LoadingScene, picture_ms
from giornata_lab.bench.compute.models import described
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.bench.compute.setting import DEFAULT
from giornata_lab.bench.compute.workload import WorkloadEdit
from giornata_lab.bench.options import rows_of, shared
from giornata_lab.bench.reporting.report import write
from giornata_lab.flags import Several, option, parsed

NAIVE: Final = "naive"
THE_PLAN, THE_ENGINE = "the plan", "the engine"
BEST: Final = "exact"
PLANNERS: Final[dict[str, Planner]] = {
    "strawman": uniform_modes(BlockMode.KV),
    NAIVE: uniform_modes(BlockMode.KV),
    "greedy": greedy_modes,
    "full": uniform_modes(BlockMode.FULL),
    BEST: exact_modes,
}
KV_SLABS, HIDDEN_SLABS = 2, 1
"""Keys and values are twice the bytes of a block's input."""


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            *shared(tokens=576, text=72, repeats=3),
            option("--steps", type=int, default=3, help="of the picture"),
            option("--mask", type=float, default=0.11, help="ratio; by default the production trace's mean"),
            option("--loads", type=Several(float), default=[4.2, 2.0, 1.0, 0.5], help="÷ time with cache"),
            option(
                "--forms",
                type=Several(click.Choice([str(form) for form in CacheForm])),
                default=[str(form) for form in CacheForm],
                help="what templates keep",
            ),
        ],
        arguments,
    )


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/loading.json``."""
    options = options_of(arguments)
    scene = _scene(rows_of(options), options)
    lines: list[dict[str, Any]] = []
    block_ms: dict[float, dict[str, float]] = {}
    for load in options.loads:  # costs anew each time: machines grow warm
        costs = block_costs.measured(
            scene.rows.family, scene.row, _loaded(scene, scene.entries[0]), options.repeats
        )
        block_ms[load] = {str(mode): round(costs.mean_ms(mode), 3) for mode in BlockMode}
        lines += _compared(scene, costs, load, options)
    workload = {
        **vars(options),
        "model": described(scene.rows.family),
        "bits": DEFAULT.bits,
        "halo": DEFAULT.halo,
        "block_ms": block_ms,
    }
    write("loading", lines, workload=workload)


def _scene(rows: Rows, options: SimpleNamespace) -> LoadingScene:
    """A masked row, and the entries of a run of its template over its own noise levels."""
    edit = WorkloadEdit(0, 0, options.mask, 0.5, 0.5, options.steps)
    row = rows.row(replace(edit, ratio=1.0), reuse=False)
    recording = RecordingSpec(frozenset(map(CacheForm, options.forms)), DEFAULT.bits)
    entries = []
    for _ in range(options.steps):
        recorder = EntryRecorder(row.level, rows.family.depth, recording)
        use = BlockInputs(recorder=recorder)
        (latent,) = denoise_step(rows.family, assemble(rows.family, [row]), [row], [use]).latents
        entries.append(recorder.entry())
        row = row.advanced(latent)
    return LoadingScene(rows, rows.masked(edit), tuple(entries))


def _loaded(scene: LoadingScene, entry: Entry) -> Slabs:
    """Slabs on the device, of every form that there is."""
    slabs = scene.slabs(entry)
    for block, kept in enumerate(entry.blocks):
        if kept.key is not None:
            slabs.keys_values(block)
        if kept.hidden is not None:
            slabs.hidden(block)
    return slabs


def _blocks(scene: LoadingScene, costs: block_costs.Costs) -> list[BlockCost]:
    """All blocks of all steps of the picture; what is around a step's blocks counts as the first one's."""
    kept = scene.entries[0].blocks[0]
    return [
        BlockCost(
            full_ms=costs.blocks[BlockMode.FULL][index],
            hidden_ms=costs.blocks[BlockMode.HIDDEN][index],
            kv_ms=costs.blocks[BlockMode.KV][index],
            hidden_slabs=HIDDEN_SLABS,
            kv_slabs=KV_SLABS,
            fresh=index == 0,
            others_ms=costs.around_ms if index == 0 else 0.0,
            hidden_kept=kept.hidden is not None,
            kv_kept=kept.key is not None,
        )
        for _ in scene.entries
        for index in range(scene.blocks)
    ]


def _compared(
    scene: LoadingScene, costs: block_costs.Costs, load: float, options: SimpleNamespace
) -> Iterator[dict[str, Any]]:
    """Every system at one speed of loading; they take turns, and the first turn warms up."""
    load_ms = load * costs.mean_ms(BlockMode.KV)
    size = scene.slabs(scene.entries[0]).load_bytes(0, BlockMode.KV)
    rate = size / (load_ms / 1e3)
    link = LoadLink(load_ms / KV_SLABS)
    blocks = _blocks(scene, costs)
    plans: dict[str, Modes] = {}
    plan_ms: dict[str, float] = {}
    for name, planner in PLANNERS.items():
        began = time.perf_counter()
        plans[name] = planner(blocks, link)
        plan_ms[name] = (time.perf_counter() - began) * 1e3
    predicted = {name: timeline(blocks, modes, link).finish_ms for name, modes in plans.items()}
    predicted[NAIVE] = sequential_end_ms(blocks, plans[NAIVE], link)
    weights = loading_engine.linear(costs, scene.rows.family.operations, scene.row.shapes, rate)
    carried_out: dict[str, list[LoadTimes]] = {name: [] for name in PLANNERS}
    engines: dict[str, list[LoadTimes]] = {name: [] for name in loading_engine.PLANNERS}
    for turn in range(options.repeats + 1):
        for name, modes in plans.items():
            took_ms = picture_ms(scene, modes, rate, ahead=name != NAIVE)
            if turn:
                carried_out[name].append(LoadTimes(took_ms, predicted[name]))
        for name, of_engine in loading_engine.PLANNERS.items():
            found = loading_engine.picture(scene, of_engine, weights, rate)
            if turn:
                engines[name].append(found)
    for name, modes in plans.items():
        counts = ((mode, modes.count(mode)) for mode in BlockMode)
        yield _line(load, THE_PLAN, name, carried_out) | {
            "plan ms": round(plan_ms[name], 2),
            "blocks": " ".join(f"{mode} {count}" for mode, count in counts if count),
        }
    for name in engines:
        yield _line(load, THE_ENGINE, name, engines) | {"plan ms": "", "blocks": ""}


def _line(load: float, run: str, name: str, pictures: dict[str, list[LoadTimes]]) -> dict[str, Any]:
    """Return how many times longer than the exact planner's picture of that run, then the figures."""
    own = pictures[name]
    ratios = [took.ms / best.ms for took, best in zip(own, pictures[BEST], strict=True)]
    took_ms, predicted_ms = (statistics.median(part) for part in zip(*own, strict=True))
    return {
        "load": load,
        "run": run,
        "loading": name,
        "÷ exact": round(statistics.median(ratios), 3),
        "spread": f"{min(ratios):.2f}-{max(ratios):.2f}",
        "picture ms": round(took_ms, 1),
        "predicted ms": round(predicted_ms, 1),
        "off by": f"{took_ms / predicted_ms - 1:+.1%}",
    }


if __name__ == "__main__":
    main()
