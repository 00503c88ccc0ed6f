"""One trace as a picture: a line for each span, steps and blob transfers of a parent on one line each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from giornata_lab.bench.systems.collector import CollectedSpan
from giornata_lab.loadgen.charts import TimelineBar, TimelineChart

TOGETHER = {
    "step": "steps",
    "blob read": "blob reads",
    "blob write": "blob writes",
}
"""Spans of a name that have one line below their parent, and the line's name."""


def timeline(spans: Sequence[CollectedSpan], title: str) -> TimelineChart:
    """The spans of one trace, each below its parent, in order of their begin; times count from the first."""
    ids = {one.id for one in spans}
    tops = [one for one in spans if one.parent not in ids]
    began_ns = min(one.began_ns for one in spans)
    bars: list[TimelineBar] = []
    _below(tops, spans, 0, began_ns, bars)
    return TimelineChart(title, "milliseconds", bars)


def _below(
    siblings: Iterable[CollectedSpan],
    spans: Sequence[CollectedSpan],
    depth: int,
    began_ns: int,
    bars: list[TimelineBar],
) -> None:
    lines: dict[object, list[CollectedSpan]] = {}
    for one in sorted(siblings, key=lambda each: each.began_ns):
        lines.setdefault(TOGETHER.get(one.name, one.id), []).append(one)
    for line in lines.values():
        first = line[0]
        pieces = [((one.began_ns - began_ns) / 1e6, (one.ended_ns - began_ns) / 1e6) for one in line]
        name = TOGETHER.get(first.name, first.name)
        if len(line) > 1:
            name = f"{len(line)} {name}"
        elif first.name in TOGETHER:
            name = first.name
        bars.append(TimelineBar(name, first.service.removeprefix("giornata-"), depth, pieces))
        inside = [one for one in spans if one.parent in {each.id for each in line}]
        _below(inside, spans, depth + 1, began_ns, bars)
