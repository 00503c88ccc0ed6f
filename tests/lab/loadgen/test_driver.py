"""Open loop: when requests leave, whatever the server does; in virtual time."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata_lab.loadgen.driver import Send, drive
from giornata_lab.loadgen.outcomes import NOT_SENT, RequestOutcome, ServerAnswer
from giornata_lab.loadgen.workload import MaskShape, WorkloadRequest, arrival_times
from tests.fakes import virtual_time
from tests.fakes.virtual_time import VirtualLoop


def due(*times: float) -> list[WorkloadRequest]:
    return [WorkloadRequest(at_s, 0, 0.1, None, 1, seed, MaskShape.BLOB) for seed, at_s in enumerate(times)]


def driven(requests: list[WorkloadRequest], send: Send, limit: int = 1000) -> list[RequestOutcome]:
    outcomes: list[RequestOutcome] = []
    virtual_time.run(drive(requests, send, outcomes.append, limit=limit))
    return outcomes


async def slowly(_: WorkloadRequest) -> ServerAnswer:
    await asyncio.sleep(100)
    return ServerAnswer(1)


@given(times=st.lists(st.floats(0, 50), min_size=1, max_size=40).map(sorted))
def test_requests_leave_when_they_are_due_although_nobody_answers(times: list[float]) -> None:
    outcomes = driven(due(*times), slowly)
    assert [outcome.sent_s for outcome in outcomes] == pytest.approx(times, abs=1e-9)
    assert [outcome.latency_s for outcome in outcomes] == pytest.approx([100.0] * len(times))
    assert sorted(outcome.in_flight for outcome in outcomes) == list(range(1, len(times) + 1))


def test_a_server_that_is_too_slow_for_the_rate_does_not_slow_the_generator() -> None:
    serving = asyncio.Lock()

    async def one_at_a_time(_: WorkloadRequest) -> ServerAnswer:
        async with serving:
            await asyncio.sleep(1)
        return ServerAnswer(1)

    outcomes = driven(due(*arrival_times(4.0, 20.0, seed=0)), one_at_a_time)
    assert max(outcome.late_s for outcome in outcomes) < 1e-6
    latencies = [outcome.latency_s for outcome in outcomes]
    assert latencies[-1] == pytest.approx(len(outcomes) - 20, abs=2), "who comes last waits for all before"
    assert sum(later > earlier for earlier, later in pairwise(latencies)) > 0.8 * len(latencies)


def test_a_slow_generator_is_found_out_and_does_not_flatter_the_server() -> None:
    async def computing(_: WorkloadRequest) -> ServerAnswer:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.pass_time(2.0)  # before anything leaves
        return ServerAnswer(1)

    outcomes = driven(due(0.0, 1.0, 2.0), computing)
    assert [outcome.late_s for outcome in outcomes] == pytest.approx([0.0, 1.0, 2.0])
    assert [outcome.latency_s for outcome in outcomes] == pytest.approx([2.0, 3.0, 4.0])


def test_who_is_due_while_too_many_wait_is_an_error_and_not_sent() -> None:
    asked: list[int] = []

    async def send(request: WorkloadRequest) -> ServerAnswer:
        asked.append(request.seed)
        return await slowly(request)

    outcomes = driven(due(0.0, 0.0, 1.0, 150.0), send, limit=2)
    assert asked == [0, 1, 3]
    [dropped] = [outcome for outcome in outcomes if outcome.answer.code]
    assert (dropped.request.seed, dropped.answer.code, dropped.sent_s) == (2, NOT_SENT, None)
    assert (dropped.late_s, dropped.latency_s) == (0.0, 0.0)


def test_when_stopped_what_has_ended_stays_and_the_rest_is_given_up() -> None:
    outcomes: list[RequestOutcome] = []

    async def stopped() -> None:
        async with asyncio.timeout(105):
            await drive(due(0.0, 50.0, 120.0), slowly, outcomes.append, limit=9)

    with pytest.raises(TimeoutError):
        virtual_time.run(stopped())
    assert [outcome.request.seed for outcome in outcomes] == [0]
