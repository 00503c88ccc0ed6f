"""How far plans are from the best: batches beside brute force, greedy beside exact; and how long planning takes.

One row's exact plan is optimal (tested); a batch's is a heuristic, `plan_batch`, whose gap on random small batches is
measured here against every plan there is. Greedy is FlashPS's Algorithm 1.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

from giornata.planning.batch_plans import BatchRow, evaluate_modes, plan_batch
from giornata.planning.block_plans import BlockCost, LoadLink, exact_modes, greedy_modes, timeline
from giornata_lab.bench.compute.brute_force import best_ms
from giornata_lab.bench.reporting.report import write
from giornata_lab.flags import option, parsed

SHAPES: Final = ((2, 4), (2, 5), (3, 3), (3, 4))
"""(rows, blocks) of batches that brute force can try: 3^12 plans are 531,441."""
FLUX_BLOCKS: Final = 57


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            option("--cases", type=int, default=40, help="of each shape"),
            option("--greedy-cases", type=int, default=500, help="of one row"),
            option("--repeats", type=int, default=10, help="of every timing"),
            option("--seed", type=int, default=0),
        ],
        arguments,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/planner_gap.json``."""
    options = options_of(arguments)
    chance = random.Random(options.seed)  # noqa: S311 - cases, no secrets
    lines = [_batches(chance, rows, blocks, options.cases) for rows, blocks in SHAPES]
    lines.append(_greedy(chance, options.greedy_cases))
    lines.append(_equal_blocks())
    lines += [_timing(chance, rows, options.repeats) for rows in (1, 2, 4, 8)]
    lines += [_timing(chance, rows, options.repeats, hidden=False) for rows in (1, 2, 4, 8)]
    workload = {
        **vars(options),
        "costs": "random: kv 1-4 ms, hidden up to 4 ms more, full 5-20 ms, a slab 0.2-4 ms, 1 slab hidden, 2 kv",
        "templates": "each row takes one of two",
    }
    write("planner_gap", lines, workload=workload)


def random_row(chance: random.Random, blocks: int, template: int, *, hidden: bool = True) -> BatchRow:
    """A row whose blocks differ; the first of them is a step's first. Its template may keep `hidden` states."""
    made = []
    for place in range(blocks):
        kv = chance.uniform(1, 4)
        made.append(
            BlockCost(
                full_ms=chance.uniform(5, 20),
                hidden_ms=kv + chance.uniform(0, 4),
                kv_ms=kv,
                hidden_slabs=1,
                kv_slabs=2,
                fresh=place == 0,
                hidden_kept=hidden,
            )
        )
    return BatchRow(tuple(made), template)


def random_link(chance: random.Random) -> LoadLink:
    """Slow enough to matter, and busy at first in half of all cases."""
    return LoadLink(chance.uniform(0.2, 4), chance.choice((0.0, chance.uniform(0, 10))))


def _batches(chance: random.Random, rows: int, blocks: int, cases: int) -> dict[str, Any]:
    """`plan_batch` over the best plan, and rows that are planned alone over it."""
    found, apart = [], []
    for _ in range(cases):
        batch = [random_row(chance, blocks, chance.randrange(2)) for _ in range(rows)]
        link = random_link(chance)
        best = best_ms(batch, link)
        found.append(plan_batch(batch, link).timeline.finish_ms / best)
        alone = [greedy_modes(row.blocks, link) for row in batch]
        apart.append(evaluate_modes(batch, alone, link).timeline.finish_ms / best)
    return _line(f"{rows} rows x {blocks} blocks", "÷ best plan", found, apart)


def _greedy(chance: random.Random, cases: int) -> dict[str, Any]:
    """Greedy over exact for one row of Flux's 57 blocks."""
    ratios = []
    for _ in range(cases):
        row, link = random_row(chance, FLUX_BLOCKS, 0), random_link(chance)
        ratios.append(_greedy_over_exact(row.blocks, link))
    return _line(f"1 row x {FLUX_BLOCKS} blocks, greedy", "÷ exact", [1.0] * len(ratios), ratios)


def _greedy_over_exact(blocks: Sequence[BlockCost], link: LoadLink) -> float:
    ended, least = (
        timeline(blocks, planner(blocks, link), link).finish_ms for planner in (greedy_modes, exact_modes)
    )
    return ended / least


def _equal_blocks() -> dict[str, Any]:
    """57 equal blocks where loading dominates: 2 ms with the cache, 10 without, 8 to load."""
    block = BlockCost(full_ms=10, hidden_ms=10, kv_ms=2, hidden_slabs=0, kv_slabs=1)
    blocks, link = [block] * FLUX_BLOCKS, LoadLink(8)
    ratio = _greedy_over_exact(blocks, link)
    return _line("57 equal blocks: kv 2, full 10, load 8", "÷ exact", [1.0], [ratio])


def _line(case: str, against: str, ours: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    return {
        "case": case,
        "measure": against,
        "ours, mean": round(statistics.mean(ours), 4),
        "ours, worst": round(max(ours), 4),
        "greedy, mean": round(statistics.mean(baseline), 4),
        "greedy, worst": round(max(baseline), 4),
        "cases": len(ours),
    }


def _timing(chance: random.Random, rows: int, repeats: int, *, hidden: bool = True) -> dict[str, Any]:
    """Milliseconds to plan a step of Flux for a batch: ours and greedy, row by row."""
    batch = [random_row(chance, FLUX_BLOCKS, index, hidden=hidden) for index in range(rows)]
    link = random_link(chance)
    ours = _times(lambda: plan_batch(batch, link), repeats)
    baseline = _times(lambda: [greedy_modes(row.blocks, link) for row in batch], repeats)
    return {
        "case": f"{rows} row{'s' * (rows > 1)} x {FLUX_BLOCKS} blocks{'' if hidden else ', keys and values alone'}",
        "measure": "ms to plan",
        "ours, mean": round(statistics.mean(ours), 2),
        "ours, worst": round(max(ours), 2),
        "greedy, mean": round(statistics.mean(baseline), 2),
        "greedy, worst": round(max(baseline), 2),
        "cases": repeats,
    }


def _times(plan: Callable[[], object], repeats: int) -> list[float]:
    plan()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        plan()
        times.append((time.perf_counter() - began) * 1e3)
    return times


if __name__ == "__main__":
    main()
