"""Continuous batching: first come first served, within capacity, nobody lost, nobody starved."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from giornata.scheduling.batch import Capacity, RowBatch, RowKey


@dataclass(frozen=True)
class Seat:
    key: RowKey
    tokens: int = 1
    step: int = field(default=0)
    background: bool = False


def seat(name: str, tokens: int = 1, *, attempt: int = 1, index: int = 0) -> Seat:
    return Seat(RowKey(name, attempt, index), tokens)


def names(members: tuple[Seat, ...]) -> list[str]:
    return [member.key.job_id for member in members]


def test_rows_join_in_order_while_they_fit_and_none_overtakes() -> None:
    batch: RowBatch[Seat] = RowBatch(Capacity(rows=3, tokens=10))
    batch.submit([seat("a", 6), seat("b", 6), seat("c", 1)])
    assert names(batch.admit()) == ["a"]
    batch.settle([], [RowKey("a", 1, 0)])
    assert names(batch.admit()) == ["b", "c"]


def test_rows_may_fill_a_step_to_its_last_token() -> None:
    batch: RowBatch[Seat] = RowBatch(Capacity(rows=3, tokens=10))
    batch.submit([seat("a", 6), seat("b", 4), seat("c", 1)])
    assert names(batch.admit()) == ["a", "b"]


def test_a_saturated_batch_lets_a_background_row_in_now_and_then() -> None:
    batch: RowBatch[Seat] = RowBatch(Capacity(rows=1, tokens=10))
    batch.submit([seat(f"a{i}") for i in range(40)])
    batch.submit([replace(seat("x"), background=True)])
    beside = []
    for step in range(40):
        members = batch.admit()
        beside += [step] if "x" in names(members) else []
        batch.settle([], [member.key for member in members if not member.background])
    assert len(beside) == 4
    assert len({b - a for a, b in pairwise(beside)}) == 1


def test_one_background_row_shares_a_step_that_has_room() -> None:
    batch: RowBatch[Seat] = RowBatch(Capacity(rows=3, tokens=10))
    runs = [replace(seat(name, 4), background=True) for name in ("x", "y")]
    batch.submit([*runs, seat("a", 3)])
    assert len(batch) == 3
    assert names(batch.admit()) == ["a", "x"]
    assert (names(batch.running), names(batch.background)) == (["a"], ["x", "y"])
    batch.settle([replace(runs[0], step=1)], [])
    assert [member.step for member in batch.background] == [1, 0]
    batch.submit([seat("b", 4)])
    assert names(batch.admit()) == ["a", "b"]
    batch.settle([], [RowKey("a", 1, 0), RowKey("b", 1, 0)])
    assert names(batch.admit()) == ["x"]
    batch.settle([], [RowKey("x", 1, 0)])
    assert names(batch.admit()) == ["y"]


def test_no_background_row_runs_while_somebody_waits() -> None:
    batch: RowBatch[Seat] = RowBatch(Capacity(rows=2, tokens=10))
    batch.submit([replace(seat("x", 1), background=True), seat("a", 6), seat("b", 6)])
    assert names(batch.admit()) == ["a"]
    assert RowKey("x", 1, 0) in batch
    assert names(batch.cancel("x")) == ["x"]
    assert RowKey("x", 1, 0) not in batch


def test_all_rows_are_taken_over_but_background_rows() -> None:
    batch: RowBatch[Seat] = RowBatch(Capacity(rows=1, tokens=10))
    batch.submit([replace(seat("x"), background=True), seat("a"), seat("b")])
    batch.admit()
    assert names(batch.take_all()) == ["a", "b"]
    assert len(batch) == 0


def test_the_same_row_twice_is_refused() -> None:
    batch: RowBatch[Seat] = RowBatch(Capacity(rows=2, tokens=100))
    batch.submit([seat("a")])
    with pytest.raises(ValueError, match="in the batch already"):
        batch.submit([seat("a")])


def test_cancel_drops_waiting_and_running_rows_of_one_attempt_or_all() -> None:
    batch: RowBatch[Seat] = RowBatch(Capacity(rows=2, tokens=100))
    batch.submit([seat("a"), seat("a", index=1), seat("b"), seat("a", attempt=2)])
    batch.admit()
    assert [s.key for s in batch.cancel("a", 1)] == [RowKey("a", 1, 0), RowKey("a", 1, 1)]
    assert names(batch.admit()) == ["b", "a"]
    assert names(batch.cancel("a")) == ["a"]
    assert len(batch) == 1


def test_results_of_a_row_cancelled_meanwhile_are_dropped() -> None:
    batch: RowBatch[Seat] = RowBatch(Capacity(rows=2, tokens=100))
    batch.submit([seat("a"), seat("b")])
    running = batch.admit()
    batch.cancel("a")
    batch.settle([replace(s, step=1) for s in running], [])
    assert [(s.key.job_id, s.step) for s in batch.running] == [("b", 1)]


def test_a_row_that_is_not_ready_keeps_its_place_and_lets_others_step() -> None:
    batch: RowBatch[Seat] = RowBatch(Capacity(rows=2, tokens=10))
    batch.submit([seat("adapter")], ready=False)
    assert batch.admit() == ()
    batch.submit([seat("a"), seat("b"), seat("c")])
    assert names(batch.admit()) == ["a", "b"], "it takes no place in the step"
    assert (names(batch.waiting), len(batch)) == (["adapter", "c"], 4)
    batch.make_ready(RowKey("adapter", 1, 0))
    batch.settle([], [RowKey("a", 1, 0)])
    assert names(batch.admit()) == ["b", "adapter"], "it comes before what came after it"


def test_a_row_that_is_not_ready_may_leave_and_come_again_ready() -> None:
    batch: RowBatch[Seat] = RowBatch(Capacity(rows=2, tokens=10))
    for cancelled in (True, False):
        batch.submit([seat("a")], ready=False)
        assert names(batch.cancel("a") if cancelled else batch.take_all()) == ["a"]
        batch.submit([seat("a")])
        assert names(batch.admit()) == ["a"]
        batch.settle([], [RowKey("a", 1, 0)])
    batch.make_ready(RowKey("a", 1, 0))  # too late, and harmless
    assert len(batch) == 0


def test_background_rows_share_a_step_while_the_only_row_that_waits_is_not_ready() -> None:
    batch: RowBatch[Seat] = RowBatch(Capacity(rows=2, tokens=10))
    batch.submit([seat("a")])
    batch.submit([seat("adapter")], ready=False)
    batch.submit([replace(seat("x"), background=True)])
    batch.submit([replace(seat("y"), background=True)], ready=False)
    assert names(batch.admit()) == ["a", "x"]
    batch.settle([], [RowKey("a", 1, 0), RowKey("x", 1, 0)])
    assert batch.admit() == ()
    batch.make_ready(RowKey("y", 1, 0))
    assert names(batch.admit()) == ["y"]


@given(st.integers(-1, 0), st.integers(-1, 0))
def test_capacity_must_let_something_run(rows: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="at least one row and one token"):
        Capacity(rows=rows, tokens=tokens)


def test_rows_that_no_longer_fit_wait_first_in_the_line_and_go_on_from_their_step() -> None:
    most = [10]
    batch: RowBatch[Seat] = RowBatch(
        Capacity(8, 100), lambda rows: sum(row.tokens for row in rows) <= most[0]
    )
    batch.submit([seat(name, 3) for name in "abcd"])
    assert names(batch.admit()) == ["a", "b", "c"]
    batch.settle([replace(row, step=1) for row in batch.running], [])
    most[0] = 7
    assert names(batch.set_aside()) == ["c"]
    assert names(batch.waiting) == ["c", "d"]
    assert names(batch.admit()) == ["a", "b"]
    batch.settle([], [RowKey("a", 1, 0)])
    assert [(row.key.job_id, row.step) for row in batch.admit()] == [("b", 1), ("c", 1)]
    most[0] = 0
    assert names(batch.set_aside()) == ["c"], "one goes on in any case"
    assert names(batch.admit()) == ["b"]
    assert batch.set_aside() == ()


def test_a_paused_row_leaves_its_step_to_others_and_goes_on_before_later_ones() -> None:
    batch: RowBatch[Seat] = RowBatch(Capacity(rows=2, tokens=10))
    batch.submit([seat("a"), seat("b"), seat("c"), seat("d")])
    assert names(batch.admit()) == ["a", "b"]
    assert batch.pause([RowKey("a", 1, 0)]) == 1
    assert names(batch.admit()) == ["b", "c"]
    batch.make_ready(RowKey("a", 1, 0))
    assert names(batch.admit()) == ["b", "c"], "no row is thrown out for it"
    batch.settle([], [RowKey("b", 1, 0)])
    assert names(batch.admit()) == ["a", "c"]


class Serving(RuleBasedStateMachine):
    """Any order of submits, inputs, steps, ends and cancels against a plain list of what should be there."""

    submitted = Bundle("submitted")

    def __init__(self) -> None:
        super().__init__()
        self.most = 3
        self.batch: RowBatch[Seat] = RowBatch(
            Capacity(rows=3, tokens=12), lambda rows: len(rows) <= self.most
        )
        self.begun: list[RowKey] = []
        self.expected: list[RowKey] = []
        self.unready: set[RowKey] = set()
        self.count = 0

    @rule(target=submitted, tokens=st.integers(1, 20), job=st.sampled_from("xyz"), ready=st.booleans())
    def submit(self, tokens: int, job: str, *, ready: bool) -> RowKey:
        self.count += 1
        member = Seat(RowKey(job, 1, self.count), tokens)
        self.batch.submit([member], ready=ready)
        self.expected.append(member.key)
        if not ready:
            self.unready.add(member.key)
        return member.key

    @rule(key=submitted)
    def make_ready(self, key: RowKey) -> None:
        self.batch.make_ready(key)
        self.unready.discard(key)

    @rule()
    def admit(self) -> None:
        running = self.batch.admit()
        assert bool(running) == bool(set(self.expected) - self.unready)  # nobody starves
        assert len(running) <= self.batch.capacity.rows
        total = sum(member.tokens for member in running)
        assert total <= self.batch.capacity.tokens or len(running) == 1

    @precondition(lambda self: self.batch.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([member.key for member in self.batch.running]))
        self.batch.settle([], [key])
        self.expected.remove(key)

    @rule(most=st.integers(1, 3))
    def set_aside(self, most: int) -> None:
        """As where the limit has been lowered to fewer rows than run."""
        self.most = most
        before = [member.key for member in self.batch.running]
        aside = [member.key for member in self.batch.set_aside()]
        assert [member.key for member in self.batch.running] + aside == before
        assert len(self.batch.running) == min(len(before), most)

    @rule(key=submitted)
    def pause(self, key: RowKey) -> None:
        """As where an input of a row is missing, which may run."""
        new = key in self.expected and key not in self.unready
        assert self.batch.pause([key]) == new
        self.unready |= {key} & set(self.expected)

    @rule(key=submitted)
    def change(self, key: RowKey) -> None:
        self.batch.change(Seat(key, 2))

    @rule(key=submitted)
    def cancel(self, key: RowKey) -> None:
        self.batch.cancel(key.job_id)
        self.expected = [k for k in self.expected if k.job_id != key.job_id]
        self.unready &= set(self.expected)

    @invariant()
    def nobody_is_lost_and_order_is_kept(self) -> None:
        running, waiting = ([m.key for m in rows] for rows in (self.batch.running, self.batch.waiting))
        assert sorted(running + waiting, key=self.expected.index) == self.expected
        self.begun += [key for key in running if key not in self.begun]
        set_aside = [key for key in self.begun if key in waiting]
        arrived = [key for key in self.expected if key in waiting and key not in set_aside]
        assert waiting == set_aside + arrived, "in the order of joining, then of arrival"
        assert running == [key for key in self.begun if key in running], "in the order of joining"
        assert not self.unready & set(running)
        assert self.batch.able == bool(set(self.expected) - self.unready)
        ready = [key for key in self.expected if key not in self.unready]
        assert len(ready) >= len(running)


TestServing = Serving.TestCase
