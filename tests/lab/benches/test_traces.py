"""One trace as a picture: each span below its parent, steps of one attempt on one line."""

from __future__ import annotations

from typing import Any

import pytest

from giornata_lab.bench.systems.collector import CollectedSpan
from giornata_lab.bench.systems.traces import timeline
from giornata_lab.loadgen.charts import TimelineChart
from giornata_lab.loadgen.drawing import svg
from giornata_lab.loadgen.drawing import timeline as drawn


def span(name: str, parent: str, began_ms: float, ended_ms: float, service: str = "router") -> CollectedSpan:
    fields: dict[str, Any] = {"kind": 1, "trace": "t", "instance": "i", "attributes": {}, "links": ()}
    return CollectedSpan(
        service=f"giornata-{service}",
        name=name,
        id=f"{name} {began_ms}",
        parent=parent,
        began_ns=int(began_ms * 1e6),
        ended_ns=int(ended_ms * 1e6),
        events=(),
        failed=False,
        **fields,
    )


SPANS = [
    span("step", "denoise 30", 45, 60, "denoiser"),
    span("door", "of the caller", 10, 100, "gateway"),
    span("job", "door 10", 20, 90),
    span("denoise", "job 20", 30, 70, "denoiser"),
    span("step", "denoise 30", 31, 44, "denoiser"),
    span("blob read", "job 20", 80, 85),
]


def test_spans_stand_below_their_parents_in_order() -> None:
    bars = timeline(SPANS, "one").bars
    assert [(bar.name, bar.colour, bar.depth) for bar in bars] == [
        ("door", "gateway", 0),
        ("job", "router", 1),
        ("denoise", "denoiser", 2),
        ("2 steps", "denoiser", 3),
        ("blob read", "router", 2),
    ]
    assert bars[0].spans == [(0, 90)]
    assert bars[3].spans == [(21, 34), (35, 50)]


def test_the_drawing_names_every_bar_and_service_and_is_the_same_each_time() -> None:
    text = svg(drawn(timeline(SPANS, "one edit")))
    for name in ("one edit", "door", "2 steps", "gateway", "router", "denoiser", "milliseconds"):
        assert name in text
    assert svg(drawn(timeline(SPANS, "one edit"))) == text


def test_a_timeline_without_bars_is_none() -> None:
    with pytest.raises(ValueError, match="one bar or more"):
        drawn(TimelineChart("", "", ()))
