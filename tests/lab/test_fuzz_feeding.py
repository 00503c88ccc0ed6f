"""Which ids of a fuzzer's requests become ids of records, and what is counted of them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from giornata_gateway.http.routes import ROUTES
from tests.lab.fuzz.feeding import FEWEST, PICTURE, POOL, Pool, fill, kind_of
from tests.lab.fuzz.openapi import read


def test_every_route_of_one_record_has_a_kind_that_can_be_made() -> None:
    kinds = {kind_of(route.path) for route in ROUTES if "{" in route.path}
    assert kinds == {"jobs", "templates", "loras", "models", "webhooks"}
    for kind in kinds:
        assert POOL.makes(kind or "")
    assert {kind_of(route.path) for route in ROUTES if "{" not in route.path} == {None}


def test_most_guesses_become_ids_and_ids_stay() -> None:
    numbers = itertools.count()
    pool = Pool({"jobs": lambda: f"job_{next(numbers)}"})
    got = [pool.exchanged("jobs", "guess") for _ in range(400)]
    assert 0.6 < sum(name is not None for name in got) / len(got) < 0.95
    assert next(numbers) == FEWEST, "no more are made than there have to be"
    assert pool.exchanged("jobs", "job_0") is None
    pool.drop("jobs", "job_0")
    assert {pool.exchanged("jobs", "job_0") for _ in range(50)} == {None}, "what is gone is asked for, too"
    assert "job_0" not in {pool.exchanged("jobs", "guess") for _ in range(200)}


def test_most_bodies_hold_what_random_text_never_is() -> None:
    names = ("init_images", "mask", "alwayson_scripts", "prompt")
    filled = [dict.fromkeys(names, "?") for _ in range(200)]
    for body in filled:
        fill("/sdapi/v1/img2img", body)
    for name in names[:3]:
        assert 0.6 < sum(body[name] != "?" for body in filled) / len(filled) < 0.95
    assert all(body["prompt"] == "?" for body in filled), "words are the fuzzer's own"
    form = {"image": b"?", "prompt": "?"}
    while form != {"image": PICTURE, "prompt": "red"}:  # each of its own luck
        fill("/v1/masks", form)


@pytest.mark.parametrize(("status", "counts"), [(200, (1, 1)), (409, (1, 1)), (404, (1, 0)), (405, (0, 0))])
def test_a_report_tells_which_requests_reach_a_record(status: int, counts: tuple[int, int]) -> None:
    def finished(path: str, status: int, *, linked: bool) -> str:
        case = {"value": {"method": "POST", "path": path}, "is_transition_applied": linked}
        answer = {"response": {"status_code": status}}
        recorder: dict[str, Any] = {"cases": {"a": case}, "interactions": {"a": answer}, "checks": {}}
        return json.dumps({"ScenarioFinished": {"recorder": recorder}})

    outcome = read(
        [finished("/v1/jobs", 202, linked=False), finished("/v1/jobs/{job_id}", status, linked=True)]
    )
    assert (outcome.cases, outcome.with_ids, outcome.reached) == (2, *counts)
    assert outcome.linked == counts[1]
    assert outcome.answers == {"202": 1, str(status): 1}
    reached = {"POST /v1/jobs/{job_id}": 1} if status == 200 else {}
    assert outcome.accepted == {"POST /v1/jobs": 1} | reached


def test_the_end_of_a_job_is_no_deletion() -> None:
    def finished(operation: str) -> str:
        failed = {
            "name": "use_after_free",
            "status": "failure",
            "failure_info": {"failure": {"operation": operation}},
        }
        recorder = {
            "cases": {},
            "interactions": {},
            "checks": {"a": [failed, {"name": "b", "status": "success"}]},
        }
        return json.dumps({"ScenarioFinished": {"recorder": recorder}})

    assert read([finished("DELETE /v1/jobs/{job_id}")]).failures == ()
    assert len(read([finished("DELETE /v1/templates/{template_id}")]).failures) == 1
