"""How answers are judged, what a run's figures are, and how they are told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from giornata_lab.loadgen.driver import judged
from giornata_lab.loadgen.outcomes import LoadFigures, RequestOutcome, ServerAnswer, figures
from giornata_lab.loadgen.report import MeasuredRun, notes, table
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


def test_fewer_pictures_than_asked_for_are_an_error_with_the_servers_code() -> None:
    told: dict[str, Any] = {"data": [{"b64_json": "x"}]}
    assert judged(200, json.dumps(told).encode(), 2) == ServerAnswer(
        1, "pictures_missing", "1 of 2 pictures came"
    )
    told["giornata"] = {"errors": [{"index": 1, "error": {"code": "row_poisoned", "message": "bad"}}]}
    assert judged(200, json.dumps(told).encode(), 2) == ServerAnswer(1, "row_poisoned", "bad")
    told["giornata"] = {"errors": ["?"]}
    assert judged(200, json.dumps(told).encode(), 2).code == "pictures_missing"


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
