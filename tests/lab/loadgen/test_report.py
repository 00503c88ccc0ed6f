"""How answers are judged, what a run's figures are, and how they are told."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from giornata_lab.loadgen.charts import Chart, PointStyle
from giornata_lab.loadgen.drawing import figure, svg
from giornata_lab.loadgen.driver import judged
from giornata_lab.loadgen.outcomes import LoadFigures, RequestOutcome, ServerAnswer, figures, spread
from giornata_lab.loadgen.report import MeasuredRun, charts, notes, table, value
from giornata_lab.loadgen.workload import MaskShape, WorkloadRequest

SVG = "{http://www.w3.org/2000/svg}"


def request(at_s: float, n: int = 1) -> WorkloadRequest:
    return WorkloadRequest(at_s, 0, 0.25, 8, n, round(at_s * 1000), MaskShape.BLOB)


def ended(at_s: float, latency_s: float, code: str | None = None, late_s: float = 0.0) -> RequestOutcome:
    answer = ServerAnswer(code=code, message="why") if code else ServerAnswer(1)
    return RequestOutcome(request(at_s), at_s + latency_s, answer, at_s + late_s, 1)


@pytest.mark.parametrize(
    ("status", "body", "answer"),
    [
        (200, {"data": [{"b64_json": "x"}]}, (1, None)),
        (200, {"data": [{"url": "/x"}, {"b64_json": "x"}]}, (2, None)),
        (200, {"data": []}, (0, "not_an_image_answer")),
        (200, {"data": [{"revised_prompt": "x"}]}, (0, "not_an_image_answer")),
        (200, [], (0, "not_an_image_answer")),
        (429, {"error": {"code": "queue_full", "message": "later"}}, (0, "queue_full")),
        (401, {"error": {"code": None, "message": "no"}}, (0, "http_401")),
        (400, {"error": {"code": 17}}, (0, "http_400")),
        (500, {"error": {"code": "two words"}}, (0, "http_500")),
        (422, {"detail": "no"}, (0, "http_422")),
        (503, "busy", (0, "http_503")),
    ],
)
def test_an_answer_is_judged_by_status_and_form(status: int, body: Any, answer: tuple[int, str]) -> None:
    found = judged(status, json.dumps(body).encode(), 1)
    assert (found.pictures, found.code) == answer
    assert bool(found.message) == (found.code is not None)


def test_what_is_no_json_is_told_as_it_is() -> None:
    assert judged(502, b"<html>\xff", 1) == ServerAnswer(0, "http_502", "<html>\ufffd")
    assert judged(200, b"\x89PNG", 1).code == "not_an_image_answer"


def test_fewer_pictures_than_asked_for_are_an_error_with_the_servers_code() -> None:
    told: dict[str, Any] = {"data": [{"b64_json": "x"}]}
    assert judged(200, json.dumps(told).encode(), 2) == ServerAnswer(
        1, "pictures_missing", "1 of 2 pictures came"
    )
    told["giornata"] = {"errors": [{"index": 1, "error": {"code": "row_poisoned", "message": "bad"}}]}
    assert judged(200, json.dumps(told).encode(), 2) == ServerAnswer(1, "row_poisoned", "bad")
    told["giornata"] = {"errors": ["?"]}
    assert judged(200, json.dumps(told).encode(), 2).code == "pictures_missing"


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentiles_are_those_of_numpy(values: list[float]) -> None:
    found = spread(values)
    assert found is not None
    expected = [np.mean(values), *np.percentile(values, [50, 95, 99]), max(values)]
    assert [found.mean, found.p50, found.p95, found.p99, found.most] == pytest.approx(expected, abs=1e-9)


def test_there_are_no_percentiles_of_nothing() -> None:
    assert spread([]) is None


def figures_of(outcomes: list[RequestOutcome], **how: Any) -> LoadFigures:
    planned = [outcome.request for outcome in outcomes]
    return figures(planned, outcomes, **{"warmup_s": 10.0, "seconds": 20.0, "slo_s": 2.0, **how})


def test_the_warm_up_is_in_no_figure() -> None:
    slow = [ended(at_s, 500.0, "timeout", late_s=9.0) for at_s in (0.0, 9.99)]
    counted = [ended(10.0, 1.0), ended(20.0, 3.0)]
    found = figures_of(slow + counted)
    assert found == figures_of(counted)
    assert (found.requests, found.succeeded, found.errors) == (2, 2, {})


def test_errors_count_by_code_and_against_the_goodput_and_not_in_latencies() -> None:
    found = figures_of(
        [
            ended(10.0, 1.0),
            ended(12.0, 2.0),
            ended(14.0, 3.0),
            ended(15.0, 0.1, "queue_full"),
            ended(16.0, 0.1, "timeout"),
            ended(17.0, 0.1, "queue_full"),
            RequestOutcome(request(18.0), 18.0, ServerAnswer(code="too_many_in_flight")),
        ]
    )
    assert found.errors == {"queue_full": 2, "timeout": 1, "too_many_in_flight": 1}
    assert next(iter(found.errors)) == "queue_full"
    assert (found.requests, found.succeeded, found.pictures) == (7, 3, 3)
    assert found.latency_s is not None
    assert (found.latency_s.mean, found.latency_s.most) == (2.0, 3.0)
    assert found.slo_share == pytest.approx(2 / 7)
    assert found.goodput_per_s == pytest.approx(2 / 20)
    assert found.offered_per_s == pytest.approx(7 / 20)
    assert found.mask_ratio == 0.25


def test_throughput_counts_until_the_last_answer() -> None:
    found = figures_of([ended(10.0, 1.0), ended(29.0, 21.0)])
    assert found.throughput_per_s == pytest.approx(2 / 40)
    assert found.goodput_per_s == pytest.approx(1 / 40)


def test_lateness_is_of_what_was_sent() -> None:
    found = figures_of(
        [ended(10.0, 1.0, late_s=0.5), RequestOutcome(request(11.0), 11.0, ServerAnswer(code="x"))]
    )
    assert found.late_s is not None
    assert found.late_s.mean == 0.5


def test_what_did_not_end_is_counted_apart() -> None:
    outcomes = [ended(10.0, 1.0)]
    planned = [request(5.0), request(10.0), request(11.0), request(12.0)]
    found = figures(planned, outcomes, warmup_s=10.0, seconds=20.0, slo_s=None)
    assert (found.requests, found.unfinished) == (1, 2)
    assert (found.slo_share, found.goodput_per_s) == (None, None)


def run(target: str, rate: float | None, *latencies: float, slo_s: float | None = 2.0) -> MeasuredRun:
    outcomes = [ended(10.0 + place, latency) for place, latency in enumerate(latencies)]
    return MeasuredRun(target, rate, 10.0, tuple(outcomes), figures_of(outcomes, slo_s=slo_s))


def printed(runs: list[MeasuredRun]) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(runs))
    return capture.get()


def test_a_table_has_a_line_a_run_and_ratios_to_the_other_server() -> None:
    text = printed([run("ours", 1.0, 1.0, 1.0), run("theirs", 1.0, 4.0, 8.0), run("ours", 2.0)])
    ours, theirs, failed = (
        line.split() for line in text.splitlines() if "/s " in line and "good" not in line
    )
    assert (ours[:8], ours[-2:]) == (["ours", "1/s", "2", "0", "1", "1", "1", "1"], ["6.00", "7.80"])
    assert theirs[-2:] == ["0.17", "0.13"]
    assert failed == ["ours", "2/s", "0", "0", *"----", "0", "0.0", "%", "0", "-", "0"]
    alone = printed([run("ours", None, 1.0, slo_s=None)])
    assert "trace" in alone
    assert "x mean" not in alone
    assert "%" not in alone


def test_notes_tell_errors_with_a_reason_and_a_slow_generator() -> None:
    outcomes = [ended(10.0, 1.0, late_s=0.9), ended(11.0, 1.0, "queue_full")]
    planned = [*(outcome.request for outcome in outcomes), request(13.0)]
    found = figures(planned, outcomes, warmup_s=10.0, seconds=20.0, slo_s=None)
    told = notes([MeasuredRun("ours", 3.0, 10.0, tuple(outcomes), found)])
    assert told == [
        "ours, 3/s: 1 x queue_full: why",
        "ours, 3/s: 1 requests were given up without an answer or not sent.",
        "ours, 3/s: the generator itself was slow: requests left up to 900 ms late.",
    ]
    assert notes([run("ours", 1.0, 1.0)]) == []


def test_the_report_has_every_request() -> None:
    told = json.loads(json.dumps(value(run("ours", 1.0, 1.0, 3.0))))
    assert [line["ended_s"] - line["at_s"] for line in told["requests"]] == [1.0, 3.0]
    assert told["figures"]["latency_s"]["mean"] == 2.0
    assert told["requests"][0]["mask_ratio"] == 0.25


def test_one_rate_has_two_charts_and_several_have_five() -> None:
    one = charts([run("ours", 1.0, 1.0, 3.0, 2.0)])
    assert one.keys() == {"latency_cdf.svg", "latency_over_time.svg"}
    assert one["latency_over_time.svg"].lines == {"1/s": [(0.0, 1.0), (1.0, 3.0), (2.0, 2.0)]}
    two = charts([run(name, rate, 1.0, 3.0) for rate in (1.0, 2.0) for name in ("ours", "theirs")])
    assert two.keys() - one.keys() == {"latency_by_rate.svg", "throughput_by_rate.svg", "slo_by_rate.svg"}
    assert {"ours P50", "ours P99", "theirs P95"} <= two["latency_by_rate.svg"].lines.keys()
    assert two["slo_by_rate.svg"].lines == {name: [(1.0, 0.5), (2.0, 0.5)] for name in ("ours", "theirs")}


def test_without_an_answer_there_is_no_chart() -> None:
    outcomes = [ended(10.0, 1.0, "timeout")]
    assert charts([MeasuredRun("ours", 1.0, 10.0, tuple(outcomes), figures_of(outcomes))]) == {}


def test_the_last_point_of_a_cdf_is_the_slowest_request() -> None:
    [points] = charts([run("ours", 1.0, *range(1, 1000))])["latency_cdf.svg"].lines.values()
    assert points[-1] == (999.0, 1.0)
    assert max(points) == points[-1]
    assert len(points) < 600


CHART = Chart("P50", "rate", "s", {"a < b": [(1, 0.5), (2, 4.0)], "c": [(1, 1.0)]}, logarithmic=True)


def test_a_chart_has_a_line_a_system_with_its_points() -> None:
    drawn = figure(CHART)
    [axes] = drawn.axes
    assert [np.asarray(line.get_xydata()).tolist() for line in axes.lines] == [
        [[1, 0.5], [2, 4.0]],
        [[1, 1.0]],
    ]
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["a < b", "c"]
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("P50", "rate", "s")
    assert (axes.get_yscale(), axes.get_xlim()[0]) == ("log", 0)


def test_a_linear_axis_begins_at_nothing_and_points_need_no_line() -> None:
    [axes] = figure(Chart("", "", "", {"a": [(0, 0.0), (1, 0.5), (1, 1.0)]}, PointStyle.DOTS)).axes
    assert (axes.get_yscale(), axes.get_ylim()[0]) == ("linear", 0)
    [line] = axes.lines
    assert (line.get_linestyle(), line.get_marker()) == ("None", ".")


def test_equal_charts_are_equal_files_that_can_be_read_on_any_page() -> None:
    text = svg(figure(CHART))
    assert text == svg(figure(CHART))
    found = ET.fromstring(text)  # noqa: S314 - our own
    assert "a < b" in [one.text for one in found.iter(f"{SVG}text")], "text stays text"
    ground = next(path for path in found.iter(f"{SVG}path") if path.attrib.get("style"))
    assert "fill: #ffffff" in ground.attrib["style"], "also on a dark page"


def test_a_chart_without_points_is_refused() -> None:
    with pytest.raises(ValueError, match="one point"):
        figure(Chart("", "", "", {}))
