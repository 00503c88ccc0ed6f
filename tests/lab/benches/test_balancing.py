"""Which of several servers gets a request."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from giornata_lab.bench.systems.balancing import LeastInFlight
from giornata_lab.loadgen.driver import drive
from giornata_lab.loadgen.outcomes import RequestOutcome, ServerAnswer
from giornata_lab.loadgen.workload import WorkloadRequest
from tests.fakes import virtual_time
from tests.lab.loadgen.test_driver import due


class Server:
    """Answers each request after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.seen: list[float] = []
        self.in_flight = 0

    async def send(self, request: WorkloadRequest) -> ServerAnswer:
        self.seen.append(request.at_s)
        self.in_flight += 1
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.in_flight -= 1
        return ServerAnswer(1)


def served(servers: list[Server], *times: float) -> None:
    balanced = LeastInFlight([server.send for server in servers])
    outcomes: list[RequestOutcome] = []
    virtual_time.run(drive(due(*times), balanced.send, outcomes.append, limit=1000))
    assert len(outcomes) == len(times)


def test_servers_that_are_equally_busy_take_turns() -> None:
    servers = [Server(0.1), Server(0.1), Server(0.1)]
    served(servers, 0, 1, 2, 3, 4, 5)
    assert [server.seen for server in servers] == [[0, 3], [1, 4], [2, 5]]


def test_a_slow_server_gets_less() -> None:
    slow, fast = Server(10.0), Server(0.5)
    served([slow, fast], 0, 1, 2, 3, 4)
    assert (slow.seen, fast.seen) == ([0], [1, 2, 3, 4])


@given(gaps=st.lists(st.floats(0, 3), min_size=1, max_size=30), seconds=st.floats(0.1, 5))
def test_nobody_has_more_than_one_more_than_another_when_it_is_chosen(
    gaps: list[float], seconds: float
) -> None:
    servers = [Server(seconds), Server(2 * seconds)]
    balanced = LeastInFlight([server.send for server in servers])

    async def checked(request: WorkloadRequest) -> ServerAnswer:
        before = [server.in_flight for server in servers]
        sending = asyncio.ensure_future(balanced.send(request))
        await asyncio.sleep(0)
        after = [server.in_flight for server in servers]
        (chosen,) = (place for place in range(2) if after[place] > before[place])
        assert before[chosen] == min(before)
        return await sending

    times = [sum(gaps[: place + 1]) for place in range(len(gaps))]
    virtual_time.run(drive(due(*times), checked, lambda _: None, limit=1000))
