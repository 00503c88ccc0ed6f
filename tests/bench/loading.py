"""A picture's time where loading is slow: the exact planner beside greedy, strawman and naive loading.

The loader is throttled so that loading a block's keys and values takes so many times what the block takes with them, as
in figure 9 of FlashPS. Systems: `exact`, `greedy` (the paper's Algorithm 1), `strawman` (every block from the cache,
loaded ahead), `naive` (a step's loads first, then its computing) and `full` (no reuse). All load one step ahead but
`naive`; every step has its own entry. The planner's own prediction stands beside what it took.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from giornata.planning.blocks import Block, Link, Mode, sequential
from giornata.planning.planner import Plan, Planner, always, exact, greedy
from giornata_denoiser.assembly import assemble
from giornata_denoiser.reuse.recording import EntryRecorder
from giornata_denoiser.reuse.slabs import Slabs
from giornata_denoiser.reuse.template import Entry, Form
from giornata_denoiser.stepping import denoise_step
from tests.bench import block_costs
from tests.bench.loading_run import Scene, picture_ms
from tests.bench.models import described
from tests.bench.options import parser, rows_of
from tests.bench.report import write
from tests.bench.rows import Rows
from tests.bench.setting import DEFAULT
from tests.bench.workload import Edit

NAIVE: Final = "naive"
PLANNERS: Final[dict[str, Planner]] = {
    "strawman": always(Mode.KV),
    NAIVE: always(Mode.KV),
    "greedy": greedy,
    "full": always(Mode.FULL),
    "exact": exact,
}
KV_SLABS, HIDDEN_SLABS = 2, 1
"""Keys and values are twice the bytes of a block's input."""


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags."""
    made = parser(__doc__, tokens=576, text=72, repeats=3)
    made.add_argument("--steps", type=int, default=3, help="of the picture (default 3)")
    made.add_argument(
        "--mask", type=float, default=0.11, help="ratio (default 0.11, the production trace's mean)"
    )
    made.add_argument(
        "--loads", type=float, nargs="+", default=[4.2, 2.0, 1.0, 0.5], help="÷ time with cache"
    )
    made.add_argument(
        "--forms",
        nargs="+",
        default=[str(form) for form in Form],
        choices=list(Form),
        help="what templates keep",
    )
    return made.parse_args(arguments)


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
        block_ms[load] = {str(mode): round(costs.mean_ms(mode), 3) for mode in Mode}
        lines += _compared(scene, costs, load, options)
    workload = {
        **vars(options),
        "model": described(scene.rows.family),
        "bits": DEFAULT.bits,
        "halo": DEFAULT.halo,
        "block_ms": block_ms,
    }
    write("loading", lines, workload=workload)


def _scene(rows: Rows, options: argparse.Namespace) -> Scene:
    """A masked row, and the entries of a run of its template over its own noise levels."""
    edit = Edit(0, 0, options.mask, 0.5, 0.5, options.steps)
    row = rows.row(replace(edit, ratio=1.0), reuse=False)
    forms = [Form(name) for name in options.forms]
    entries = []
    for _ in range(options.steps):
        recorder = EntryRecorder(row.sigma, rows.family.blocks, forms, DEFAULT.bits)
        (latent,), _clean = denoise_step(rows.family, assemble(rows.family, [row]), [row], [recorder])
        entries.append(recorder.entry())
        row = row.advanced(latent)
    return Scene(rows, rows.masked(edit), tuple(entries))


def _loaded(scene: Scene, entry: Entry) -> Slabs:
    """Slabs on the device, of every form that there is."""
    slabs = scene.slabs(entry)
    for block, kept in enumerate(entry.blocks):
        if kept.key is not None:
            slabs.keys_values(block)
        if kept.hidden is not None:
            slabs.hidden(block)
    return slabs


def _blocks(scene: Scene, costs: block_costs.Costs) -> list[Block]:
    """All blocks of all steps of the picture; what is around a step's blocks counts as the first one's."""
    kept = scene.entries[0].blocks[0]
    return [
        Block(
            full_ms=costs.blocks[Mode.FULL][index],
            hidden_ms=costs.blocks[Mode.HIDDEN][index],
            kv_ms=costs.blocks[Mode.KV][index],
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
    scene: Scene, costs: block_costs.Costs, load: float, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Every system at one speed of loading; they take turns, and the first turn warms up."""
    load_ms = load * costs.mean_ms(Mode.KV)
    size = scene.slabs(scene.entries[0]).load_bytes(0, Mode.KV)
    rate = size / (load_ms / 1e3)
    link = Link(load_ms / KV_SLABS)
    blocks = _blocks(scene, costs)
    plans: dict[str, Plan] = {}
    plan_ms: dict[str, float] = {}
    for name, planner in PLANNERS.items():
        began = time.perf_counter()
        plans[name] = planner(blocks, link)
        plan_ms[name] = (time.perf_counter() - began) * 1e3
    times: dict[str, list[float]] = {name: [] for name in PLANNERS}
    for turn in range(options.repeats + 1):
        for name, plan in plans.items():
            took = picture_ms(scene, plan.modes, rate, ahead=name != NAIVE)
            if turn:
                times[name].append(took)
    for name, plan in plans.items():
        naive = sequential(blocks, plan.modes, link)
        predicted = naive if name == NAIVE else plan.timeline.finish_ms
        yield _line(load, name, times, predicted, plan, plan_ms[name])


def _line(
    load: float, name: str, times: dict[str, list[float]], predicted: float, plan: Plan, plan_ms: float
) -> dict[str, Any]:
    """How many times longer than the exact planner's picture, then the figures."""
    ratios = [own / best for own, best in zip(times[name], times["exact"], strict=True)]
    took = statistics.median(times[name])
    counts = {str(mode): plan.modes.count(mode) for mode in Mode}
    return {
        "load": load,
        "loading": name,
        "÷ exact": round(statistics.median(ratios), 3),
        "spread": f"{min(ratios):.2f}-{max(ratios):.2f}",
        "picture ms": round(took, 1),
        "predicted ms": round(predicted, 1),
        "off by": f"{took / predicted - 1:+.1%}",
        "plan ms": round(plan_ms, 2),
        "blocks": " ".join(f"{mode} {count}" for mode, count in counts.items() if count),
    }


if __name__ == "__main__":
    main()
