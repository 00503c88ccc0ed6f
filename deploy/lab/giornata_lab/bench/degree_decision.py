"""What a decision of the rule of degrees costs in processor time, by how many rows a pool of eight devices has.

`full` rows compute all their tokens; of `masked` ones a third have begun, and pay for leaving their devices. No step
is in flight, so every row is planned, and more is to do than can be in time. Baselines: each row on one device by
deadline, which plans nothing, and the rule without pushing rows out. ``python -m giornata_lab.bench.degree_decision
--help``.
"""

from __future__ import annotations

import random
import time
from typing import Any, Final

from giornata.scheduling.degrees.pool import DEGREES, PoolRow, PoolRule
from giornata.scheduling.degrees.rule import ReplanningRule
from giornata_lab.bench.reporting.report import Measurement, measured, write
from giornata_lab.flags import Several, option, parsed
from giornata_lab.simulation.degrees.baselines import FixedDegrees
from giornata_lab.simulation.degrees.step_times import eager_s

ROWS: Final = (4, 8, 16, 32, 64)
DEVICES: Final = 8
SIDES: Final = (256, 512, 1024, 2048)
STEPS: Final = 50
BEGUN: Final = 3
"""One masked row of so many has begun."""
SEED: Final = 1
AIMS_MS: Final = {32: 1.0}
PAPER_MS: Final = {32: 10.0}
"""TetriServe's limit for a round."""


def waiting(rows: int, chance: random.Random, *, masked: bool) -> list[PoolRow]:
    """Rows of mixed sizes with some steps left, due when an eighth of the pool could have computed them, or sooner."""
    found = []
    for key in range(rows):
        tokens = (chance.choice(SIDES) / 16) ** 2
        computed = tokens * chance.choice((0.05, 0.1, 0.2, 0.4)) if masked else tokens
        step_s = {degree: eager_s(degree, tokens, computed) for degree in DEGREES}
        left = chance.randint(1, STEPS)
        due_s = left * min(step_s.values()) + chance.uniform(0.5, 3) * rows / 4
        found.append(
            PoolRow(
                key,
                0.0,
                due_s,
                left,
                step_s,
                {degree: eager_s(degree, tokens) for degree in DEGREES},
                devices=(key % DEVICES,) if masked and key % BEGUN == 0 else (),
            )
        )
    return found


def cost(rule: PoolRule, cases: list[list[PoolRow]]) -> Measurement:
    """Milliseconds of processor time of a decision about each of `cases`, none of which the rule has seen before."""
    times, free = [], frozenset(range(DEVICES))
    for rows in cases:
        began = time.process_time()
        rule.decide(0.0, rows, free)
        times.append((time.process_time() - began) * 1e3)
    return measured(times)


def main() -> None:
    """Print the table and write ``out/bench/degree_decision.json``."""
    options = parsed(
        __doc__,
        [
            option("--rows", type=Several(int), default=ROWS, help="numbers of rows"),
            option("--cases", type=int, default=60, help="decisions of each"),
        ],
    )
    table: list[dict[str, Any]] = []
    for kind in ("full", "masked"):
        for rows in options.rows:
            chance = random.Random(SEED)  # noqa: S311 - a workload
            cases = [waiting(rows, chance, masked=kind == "masked") for _ in range(options.cases)]
            rule = cost(ReplanningRule(DEVICES), cases)
            table.append(
                {
                    "rows": rows,
                    "kind": kind,
                    "decision ms": rule.as_dict(),
                    "aim ms": AIMS_MS.get(rows, "-"),
                    "paper ms": PAPER_MS.get(rows, "-"),
                    "fixed ms": cost(FixedDegrees(DEVICES, 1, by_deadline=True), cases).as_dict(),
                }
            )
    write(
        "degree_decision",
        table,
        workload={"devices": DEVICES, "cases": options.cases, "steps": STEPS, "sides": SIDES, "seed": SEED},
    )


if __name__ == "__main__":
    main()
