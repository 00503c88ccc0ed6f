"""The one place where benchmarks make engines, so that a change of what an engine takes is a change of this file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from giornata_denoiser.batch import Capacity, RowKey
from giornata_denoiser.engine import Engine
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.reuse.loader import Loader
from giornata_denoiser.row import Row

ROWS = 8
"""Most rows of a step."""
TOKENS = 1 << 20


@contextmanager
def engine_with(family: Family, *, rows: int = ROWS) -> Iterator[Engine]:
    """An engine that loads ahead, for as long as its context lasts."""
    with Loader() as loader:
        yield Engine(family, Capacity(rows, TOKENS), time.perf_counter, loader=loader)


def drained(engine: Engine, rows: Sequence[Row]) -> list[Row]:
    """`rows` when all are done, in order; whoever fails raises."""
    engine.batch.submit(rows)
    done: dict[RowKey, Row] = {}
    while (report := engine.step()) is not None:
        if report.failed:
            raise report.failed[0].error
        done |= {row.key: row for row in report.advanced if row.done}
    return [done[row.key] for row in rows]
