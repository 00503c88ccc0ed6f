"""How long the router's look-up among similar prompts takes: ``python -m tests.bench.prompt_lookup``.

Times are the processor's, best with ``OMP_NUM_THREADS=1``. The prompts have one key, the worst case of the index, and
lie around topics; queries are near some of them.
"""

from __future__ import annotations

import time
from typing import Final

import click
import numpy as np

from giornata.approximate.nearest import Embedding, Nearest
from tests.bench.reporting.report import write

NUMBERS: Final = 768
TOPICS: Final = 500
QUERIES: Final = 500


def prompts(count: int, random: np.random.Generator) -> Embedding:
    """(count, NUMBERS) of length 1, near to topics."""
    topics = random.standard_normal((TOPICS, NUMBERS))
    drawn = topics[random.integers(0, TOPICS, count)] + 0.7 * random.standard_normal((count, NUMBERS))
    found: Embedding = (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)
    return found


def measured(count: int) -> dict[str, object]:
    """Times in ms of a look-up of ten among `count` prompts and of an addition, and how often the nearest was found."""
    random = np.random.default_rng(0)
    known = prompts(count, random)
    nearest = Nearest(NUMBERS)
    began = time.process_time()
    for number, embedding in enumerate(known):
        nearest.add(number, embedding)
    add_ms = (time.process_time() - began) / count * 1e3
    near = known[random.integers(0, count, QUERIES)] + 0.02 * random.standard_normal((QUERIES, NUMBERS))
    queries = (near / np.linalg.norm(near, axis=1, keepdims=True)).astype(np.float32)
    times, found = [], 0
    for query in queries:
        began = time.process_time()
        (first, *_) = nearest.nearest(query, 10)
        times.append((time.process_time() - began) * 1e3)
        found += first.number == int(np.argmax(known @ query))
    p50, p95 = np.percentile(times, [50, 95])
    return {
        "prompts": count,
        "p50_ms": round(float(p50), 3),
        "p95_ms": round(float(p95), 3),
        "add_ms": round(add_ms, 3),
        "nearest_found": found / QUERIES,
    }


@click.command()
@click.option("--prompts", "counts", multiple=True, type=int, default=(1_000, 2_000, 10_000, 50_000))
def main(counts: tuple[int, ...]) -> None:
    """Measure, print and write."""
    rows = [measured(count) for count in counts]
    for row in rows:
        click.echo(row)
    write("prompt_lookup", rows, workload={"numbers": NUMBERS, "queries": QUERIES, "topics": TOPICS})


if __name__ == "__main__":
    main()
