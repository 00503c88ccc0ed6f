"""The world around a rule: times that rows take, and decisions that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import pytest

from giornata.scheduling.degrees.pool import PoolDecision, PoolRow, StepStart
from giornata_lab.simulation.degrees import workloads
from giornata_lab.simulation.degrees.workloads import TETRISERVE, PoolRequest, PoolRowSize
from giornata_lab.simulation.degrees.world import PoolWorld, WrongDecision

DEGREES = (1, 2, 4)
SMALL = PoolRowSize(256, 256)
MASKED = PoolRowSize(1024, 448)
ALONE_S = workloads.times(TETRISERVE, SMALL, DEGREES)

Say = Callable[[float, Sequence[PoolRow], AbstractSet[int]], PoolDecision]


class Saying:
    """A rule that says what a function does, and keeps what it was told."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.told: list[tuple[float, list[PoolRow], AbstractSet[int]]] = []

    def decide(self, now_s: float, rows: Sequence[PoolRow], free: AbstractSet[int]) -> PoolDecision:
        self.told.append((now_s, list(rows), free))
        return self._say(now_s, rows, free)


class Script(Saying):
    """A rule that says its decisions one after the other, then that nothing begins."""

    def __init__(self, *decisions: PoolDecision) -> None:
        left = list(decisions)
        super().__init__(lambda *_: left.pop(0) if left else PoolDecision())


def begin(*rows: int, on: tuple[int, ...] = (0,), steps: int = 1) -> PoolDecision:
    return PoolDecision((StepStart(rows, on, steps),))


def request(number: int = 0, at_s: float = 0.0, size: PoolRowSize = SMALL, steps: int = 3) -> PoolRequest:
    return PoolRequest(number, at_s, at_s + 10.0, size, steps)


def test_a_row_takes_the_steps_that_it_was_given() -> None:
    rule = Script(begin(0), begin(0, on=(0, 1)), begin(0, on=(0, 1)))
    (ended,) = PoolWorld([request()], rule, DEGREES, devices=4).run()
    assert ended.end_s == pytest.approx(ALONE_S[1] + 2 * ALONE_S[2])
    assert ended.device_s == pytest.approx(ALONE_S[1] + 4 * ALONE_S[2])
    assert ended.moves == 1
    assert dict(ended.degrees) == {1: 1, 2: 2}
    assert ended.met


def test_a_rule_sees_rows_in_flight_and_the_devices_that_they_leave() -> None:
    rule = Script(begin(0, on=(1, 2), steps=2), begin(1, on=(0,), steps=3), begin(0, on=(1, 2)))
    PoolWorld([request(), request(1, at_s=0.001)], rule, DEGREES, devices=4).run()
    now_s, rows, free = rule.told[1]
    assert (now_s, free) == (0.001, {0, 3})
    assert [(row.left, row.devices, row.boundary) for row in rows] == [(1, (1, 2), False), (3, (), True)]
    assert rows[0].until_s == pytest.approx(2 * ALONE_S[2])


def test_a_masked_row_computes_its_first_step_and_one_on_other_devices_in_full() -> None:
    rule = Script(begin(0, on=(0, 1), steps=2), begin(0, on=(2, 3), steps=2), begin(0, on=(2, 3)))
    (ended,) = PoolWorld([request(size=MASKED, steps=5)], rule, DEGREES, devices=4).run()
    masked_s, full_s = (
        workloads.times(TETRISERVE, MASKED, DEGREES)[2],
        workloads.moved_times(TETRISERVE, MASKED, DEGREES)[2],
    )
    assert full_s > 1.5 * masked_s
    assert ended.end_s == pytest.approx(2 * full_s + 3 * masked_s)
    assert ended.moves == 1


def test_rows_that_share_a_step_end_it_together_and_count_their_part() -> None:
    rule = Script(begin(0, 1, on=(0, 1)), begin(0, 1, on=(0, 1)))
    ended = PoolWorld([request(steps=2), request(1, steps=2)], rule, DEGREES, devices=2).run()
    shared_s = workloads.shared_s(TETRISERVE, [(SMALL, False)] * 2, 2)
    assert ALONE_S[2] < shared_s < 2 * ALONE_S[2]
    assert [row.end_s for row in ended] == pytest.approx([2 * shared_s] * 2)
    assert [row.device_s for row in ended] == pytest.approx([2 * shared_s] * 2)


def test_of_rows_that_share_a_step_those_that_move_compute_in_full() -> None:
    rule = Script(begin(0), begin(0, 1))
    ended = PoolWorld([request(size=MASKED, steps=2), request(1, size=MASKED, steps=1)], rule, (1,)).run()
    first_s = workloads.moved_times(TETRISERVE, MASKED, (1,))[1]
    assert ended[1].end_s == pytest.approx(
        first_s + workloads.shared_s(TETRISERVE, [(MASKED, False), (MASKED, True)], 1)
    )


def test_a_rule_is_woken_when_it_asked_and_once() -> None:
    rule = Script(PoolDecision(wake_s=0.5), begin(0, steps=3))
    (ended,) = PoolWorld([request()], rule, DEGREES).run()
    assert [now_s for now_s, _, _ in rule.told] == [0.0, 0.5]
    assert ended.end_s == pytest.approx(0.5 + 3 * ALONE_S[1])


@pytest.mark.parametrize(
    ("decisions", "text"),
    [
        ([begin(0, on=())], "received devices ()"),
        ([begin(0, on=(1, 0))], "ascending, each once"),
        ([begin(0, on=(0, 0))], "ascending, each once"),
        ([begin(0, on=(7,))], "free are [0, 1, 2, 3]"),
        ([PoolDecision((StepStart((0,), (0, 1)), StepStart((1,), (1,))))], "free are [2, 3]"),
        ([begin(0, on=(1, 2))], "no group of the pool"),
        ([begin(0, on=(0, 1, 2))], "received degree 3"),
        ([begin(5)], "received row 5, which the pool does not have"),
        ([begin()], "received rows ()"),
        ([begin(0, 0)], "each once"),
        (
            [PoolDecision((StepStart((0,), (0,)), StepStart((0,), (1,))))],
            "received row 0, which is in a step",
        ),
        ([begin(0, steps=0)], "received 0 steps; accepted are 1 to 3"),
        ([begin(0, steps=4)], "received 4 steps; accepted are 1 to 3"),
        ([PoolDecision()], "2 rows wait, no step is in flight and none began"),
        ([PoolDecision(wake_s=0.0)], "asked to be woken at 0 s; it is 0 s"),
    ],
)
def test_what_cannot_begin_is_refused(decisions: list[PoolDecision], text: str) -> None:
    subsets = {(0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2), (0, 1, 2, 3)}
    world = PoolWorld([request(), request(1)], Script(*decisions), DEGREES, devices=4, subsets=subsets)
    with pytest.raises(WrongDecision) as refused:
        world.run()
    assert text in str(refused.value)
