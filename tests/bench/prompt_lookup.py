"""The nearest of up to 50,000 prompts of one key: by a matrix product, and as the prompt cache does, by usearch.

In processor time; recall is how often usearch finds the nearest that the product finds.
``python -m tests.bench.prompt_lookup --help``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from giornata.approximate.cache import OVER
from giornata.approximate.index import PRODUCT, PromptIndex, Vector
from tests.bench.reporting.report import Measured, measured, write
from tests.flags import Several, option, parsed

NUMBERS: Final = 768
"""Of an embedding: CLIP ViT-L's pooled one."""
SUBJECTS: Final = 200
"""Prompts lie about so many centres."""
APART: Final = 0.5
"""Deviation of a prompt's numbers from its centre's, whose own is 1."""
REWORDED: Final = 0.01
"""Deviation of a question's numbers from a prompt's."""
AIM_MS: Final = 1.0
T = TypeVar("T")


def prompts(count: int, chance: np.random.Generator) -> Vector:
    """(count, NUMBERS), each of length 1."""
    centres = chance.normal(size=(SUBJECTS, NUMBERS))
    made = centres[chance.integers(0, SUBJECTS, count)] + APART * chance.normal(size=(count, NUMBERS))
    return _unit(made)


def questions(known: Vector, count: int, chance: np.random.Generator) -> Vector:
    """(count, NUMBERS), each near one of the prompts that are known."""
    asked = known[chance.integers(0, len(known), count)]
    return _unit(asked + REWORDED * chance.normal(size=asked.shape))


def look_up(size: int, asked: int, seed: int) -> list[dict[str, Any]]:
    """Lines of the table for so many prompts, the product's first."""
    chance = np.random.default_rng(seed)
    known = prompts(size, chance)
    wanted = questions(known, asked, chance)
    truth: list[str] = []
    lines = list[dict[str, Any]]()
    for name, most in (("product", 2 * size), ("cache", PRODUCT)):
        index = PromptIndex(most)
        added = [_timed(index.add, f"p{row}", known[row])[0] for row in range(size)]
        nearest = [_timed(index.nearest, one, 1 + OVER) for one in wanted]
        found = [near[0].entry_id for _, near in nearest]
        truth = truth or found
        gone = chance.choice(size, min(asked, size // 2), replace=False)
        removed = [_timed(index.remove, f"p{row}")[0] for row in gone]
        lines.append(_line(name, size, [took for took, _ in nearest], added[-asked:], removed))
        lines[-1]["recall"] = sum(map(str.__eq__, found, truth)) / asked
    first = lines[0]["look-up ms"]["p95"]
    return [{"product's p95 / own": round(first / line["look-up ms"]["p95"], 2), **line} for line in lines]


def _line(
    name: str, size: int, found: Sequence[float], added: Sequence[float], removed: Sequence[float]
) -> dict[str, Any]:
    told: dict[str, Measured] = {
        "look-up": measured(found),
        "add": measured(added),
        "remove": measured(removed),
    }
    return {
        "by": name,
        "prompts": size,
        "aim ms": AIM_MS,
        **{f"{what} ms": each.as_dict() for what, each in told.items()},
    }


def _timed(call: Callable[..., T], *arguments: object) -> tuple[float, T]:
    """Milliseconds of processor time, and what came of it."""
    began = time.process_time()
    made = call(*arguments)
    return (time.process_time() - began) * 1e3, made


def _unit(values: np.ndarray[Any, Any]) -> Vector:
    made: Vector = (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and write ``out/bench/prompt_lookup.json``."""
    options = parsed(
        __doc__,
        [
            option("--sizes", type=Several(int), default=[1000, 10_000, 50_000], help="prompts of a key"),
            option(
                "--asked", type=int, default=500, help="look-ups, additions and removals that are measured"
            ),
            option("--seed", type=int, default=0),
        ],
        arguments,
    )
    sizes: Iterable[int] = options.sizes
    lines = [line for size in sizes for line in look_up(size, options.asked, options.seed)]
    write("prompt_lookup", lines, workload=vars(options) | {"numbers": NUMBERS, "subjects": SUBJECTS})


if __name__ == "__main__":
    main()
