"""What the benchmarks' tables say of what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from giornata_lab.bench.overhead import BOOKKEEPING, rows
from giornata_lab.bench.reporting.report import Measurement
from giornata_lab.bench.throughput import Limits, _lines

TIME = Measurement(2.0, 3.0, 4.0, 1.0, 10)


def test_throughput_is_held_against_both_limits() -> None:
    times = {"base": [4.0, 4.0], "plain": [2.0, 2.0], "corrected": [2.5, 2.5]}
    limits = {"plain": Limits(4.0), "corrected": Limits(4.0, 2.0)}
    found: dict[str, Any] = {line["system"]: line for line in _lines("equal", 8, times, "base", limits)}
    first = "of the limit, some in full"
    assert (found["base"]["of the limit"], found["base"][first]) == ("", "")
    assert (found["plain"]["of the limit"], found["plain"][first]) == (0.5, "")
    assert (found["corrected"]["of the limit"], found["corrected"][first]) == (0.4, 0.8)
    assert found["corrected"]["limit, some in full"] == 2.0
    assert len({tuple(line) for line in found.values()}) == 1, "a table has one set of columns"


def test_overhead_names_what_the_paper_has_no_figure_of() -> None:
    cases = {"batch changed": TIME}
    found = {row["measure"]: row for row in rows(TIME, TIME, TIME, cases, cases, cases)}
    assert found[f"{BOOKKEEPING}, batch changed"]["paper_ms"] == "-"
    assert found["router decision"]["paper ÷ ours"] == pytest.approx(0.3)
    assert found["batch assembly, batch changed"]["paper ÷ ours"] == pytest.approx(0.6)
