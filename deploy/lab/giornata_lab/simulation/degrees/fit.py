"""Fits step times to what TetriServe's paper says of its own, and tells what cannot be met.

``python -m giornata_lab.simulation.degrees.fit`` prints the formula found, its seconds by size and degree, and each
figure of the paper beside what it gives, with standard errors over five seeds. The search asks only for fixed degrees
and for what is said of step times; Algorithm 1 (table 5) is held out. ``--search`` finds the formula again, in a
quarter of an hour of one core.

The paper: Lu et al., "TetriServe: Efficiently Serving Mixed DiT Workloads", ASPLOS '26.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import fmean
from typing import Final

from giornata_lab.flags import option, parsed
from giornata_lab.simulation.degrees import workloads
from giornata_lab.simulation.degrees.rules import (
    AS_WRITTEN,
    BEST_DEGREES,
    POWERS,
    RSSP,
    PoolRuleCase,
    PoolRun,
    RuleName,
    RuleSetting,
    by_side,
    run_case,
    standard_error,
)
from giornata_lab.simulation.degrees.workloads import (
    SLO_S,
    TETRISERVE,
    PoolRowSize,
    PoolWorkload,
    SizeMix,
    StepFormula,
    tokens_of,
)

STEPS: Final = PoolWorkload().steps
SEEDS: Final = range(5)
TOLERANCE: Final = 0.05
LOOSEST: Final = 1.5
"""The largest SLO scale of the paper."""
NEARLY_ALL: Final = 0.95
"""*Near-perfect*, as a share."""
NEARNESS: Final = 1.0
"""What one constant e times away from `START` costs, beside a figure missed by the tolerance."""
STRIDES: Final = (1.2, 1.1, 1.05, 1.02, 1.01)
"""The search multiplies constants by these, coarse ones first."""
UNIFORM, SKEWED = (PoolWorkload(mix=mix) for mix in (SizeMix.UNIFORM, SizeMix.SKEWED))

Found = Callable[[StepFormula], Sequence[float]]
"""What a formula gives for a figure, by seed where it is drawn."""


@dataclass(frozen=True)
class PaperFigure:
    """What the paper says."""

    of: str
    where: str
    low: float
    high: float
    found: Found

    def missed(self, formula: StepFormula) -> float:
        """Return by how many tolerances a formula misses it."""
        value = fmean(self.found(formula))
        return max(self.low - value, value - self.high, 0.0) / TOLERANCE


def picture_s(formula: StepFormula, side: int, degree: int) -> float:
    """Seconds of all steps of a picture."""
    return STEPS * workloads.times(formula, PoolRowSize(side, tokens_of(side)), (degree,))[degree]


def attained(rule: RuleSetting, load: PoolWorkload, side: int | None, formula: StepFormula) -> list[float]:
    """Share of deadlines kept by seed, of all pictures or of one size."""
    runs = _runs(rule, load, formula)
    return [by_side(run.outcomes)[side] if side else run.summary.attainment for run in runs]


@lru_cache(maxsize=8)
def _runs(rule: RuleSetting, load: PoolWorkload, formula: StepFormula) -> list[PoolRun]:
    """By seed; figures of one formula ask for some again."""
    return [run_case(PoolRuleCase(replace(load, seed=seed), rule, formula=formula)) for seed in SEEDS]


def _fixed(degree: int) -> RuleSetting:
    return RuleSetting(RuleName.FIXED, (degree,))


def _best_fixed(load: PoolWorkload, formula: StepFormula) -> list[float]:
    return max((attained(_fixed(k), load, None, formula) for k in POWERS), key=fmean)


def _of_limit(side: int, degree: int, formula: StepFormula) -> list[float]:
    return [picture_s(formula, side, degree) / SLO_S[side] / LOOSEST]


def _figures() -> Iterator[PaperFigure]:
    for side, degree in BEST_DEGREES.items():
        of = f"{side}² on %d, of 1.5 times its limit"
        if side < max(BEST_DEGREES):
            yield PaperFigure(of % degree, "6.1: RSSP's degree", 0, 1, partial(_of_limit, side, degree))
        if degree > 1:
            fewer = degree // 2
            yield PaperFigure(of % fewer, "6.1: RSSP has more", 1, math.inf, partial(_of_limit, side, fewer))
    for load, kept in ((UNIFORM, 0.32), (SKEWED, 0.04)):
        yield PaperFigure(f"RSSP, {load.mix} 1.0", "table 3", kept, kept, partial(attained, RSSP, load, None))
    for degree in (1, 2):
        small = partial(attained, _fixed(degree), UNIFORM, 256)
        yield PaperFigure(f"degree {degree}, 256² of uniform 1.0", "2.3: near-perfect", NEARLY_ALL, 1, small)
    for rate in (6.0, 12.0):
        best = partial(_best_fixed, replace(UNIFORM, per_minute=rate))
        yield PaperFigure(f"best fixed degree, uniform 1.0, {rate:g} a minute", "2.3", 0, 0.6, best)


TABLE_5: Final = ((UNIFORM, 1.0, 0.63), (UNIFORM, 1.5, 0.78), (SKEWED, 1.0, 0.36), (SKEWED, 1.5, 0.55))
MINUTE: Final = PaperFigure(
    "minutes of 2048² on one device", "1: up to one", 50 / 60, 1, lambda f: [picture_s(f, 2048, 1) / 60]
)
FIGURES: Final = (MINUTE, *_figures())
HELD_OUT: Final = tuple(
    PaperFigure(
        f"Algorithm 1 as written, {load.mix} {scale}",
        "table 5",
        kept,
        kept,
        partial(attained, AS_WRITTEN, replace(load, scale=scale), None),
    )
    for load, scale, kept in TABLE_5
)
START: Final = StepFormula(2e-3, 700e12, 300e12, 100e-6, 100e-6)
"""What an H100 does: two thirds of its peak in linear layers, a third in attention."""
CONSTANTS: Final = ("fixed_s", "linear", "attention", "calls_s", "doubling_s")


def cost(formula: StepFormula, limit: float = math.inf) -> float:
    """What the search makes small: squares of what is missed, and a little for leaving :data:`START`.

    Beyond `limit` it is not counted to the end.
    """
    ratios = (getattr(formula, name) / getattr(START, name) for name in CONSTANTS)
    total = NEARNESS * sum(math.log(ratio) ** 2 for ratio in ratios)
    for figure in FIGURES:
        if total > limit:
            break
        total += figure.missed(formula) ** 2
    return total


def search(formula: StepFormula) -> StepFormula:
    """Return the formula near `formula` whose cost no stride of one constant, or of two, lowers."""
    least = cost(formula)
    for stride in STRIDES:
        moves = [{name: by} for name in CONSTANTS for by in (stride, 1 / stride)]
        moves += [{**a, **b} for a, b in itertools.combinations(moves, 2) if a.keys() != b.keys()]
        better = True
        while better:
            better = False
            for move in moves:
                tried = replace(formula, **{name: getattr(formula, name) * by for name, by in move.items()})
                if (costs := cost(tried, least)) < least:
                    formula, least, better = tried, costs, True
    return formula


def lines(formula: StepFormula) -> Iterator[str]:
    """The formula, its seconds, and the paper's figures beside it."""
    yield f"{formula}"
    for side in SLO_S:
        yield f"{side}²: " + ", ".join(f"{picture_s(formula, side, k):.2f} s on {k}" for k in POWERS)
    for figure in (*FIGURES, *HELD_OUT):
        values = figure.found(formula)
        found = f"{fmean(values):.3f} ± {standard_error(values):.3f}"
        yield f"{figure.of} ({figure.where}): {figure.low:g} to {figure.high:g}; {found}"


def main() -> None:
    """Print the fit."""
    options = parsed(__doc__, [option("--search", is_flag=True, help="find the formula again")])
    for line in lines(search(START) if options.search else TETRISERVE):
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
