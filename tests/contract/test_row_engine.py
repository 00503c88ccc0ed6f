"""What every engine owes the service: :class:`giornata_denoiser.engine.engine.RowEngine`."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

import pytest

from giornata.planning.operations import COMPUTE
from giornata.scheduling.batch import Capacity
from giornata.scheduling.degrees.rule import ReplanningOptions
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.engine.engine import RowEngine
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.fakes.pool import pool
from tests.fakes.profiles import PROFILE, WEIGHTS, record
from tests.fakes.row_engine import SteppedEngine
from tests.patience import HUNG_S
from tests.unit.denoiser.engine.test_loop import Gated, GatedLoop

FAMILY = tiny_flux.family()


class Stepper(Protocol):
    """An engine whose steps a test begins and ends."""

    @property
    def engine(self) -> RowEngine: ...

    def begin(self) -> None:
        """Wait until a step is under way."""

    def finish(self) -> StepReport:
        """End it and wait for its report."""


class Fake:
    def __init__(self, capacity: Capacity) -> None:
        self.reports: list[StepReport] = []
        self.engine = SteppedEngine(capacity, self.reports.append)

    def begin(self) -> None:
        self.engine.begin()

    def finish(self) -> StepReport:
        self.engine.finish()
        return self.reports.pop()


SLOW = PROFILE.model_copy(update={"compute": record(COMPUTE, (1e9, *WEIGHTS[1:]))})
"""By which no step is about to end: nothing is ordered ahead, so that a row that arrives joins the next step."""


class GatedPool:
    """A pool of one device over a gated network."""

    def __init__(self, capacity: Capacity) -> None:
        self.network = Gated()
        self.reports: queue.Queue[StepReport] = queue.Queue()
        self.engine = pool(
            [tiny_flux.family(self.network)],
            self.reports.put,
            self.reports.put,  # type: ignore[arg-type]  # a crash is no report: the test fails
            rows=capacity.rows,
            tokens=capacity.tokens,
            profile=SLOW,
            switches=ReplanningOptions(cap_s=math.inf),
        )

    def begin(self) -> None:
        assert self.network.begun.acquire(timeout=HUNG_S)

    def finish(self) -> StepReport:
        self.network.gate.release()
        return self.reports.get(timeout=HUNG_S)


Make = Callable[[Capacity], Stepper]


@pytest.fixture(params=[GatedLoop, Fake, GatedPool])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    with ExitStack() as stack:

        def made(capacity: Capacity) -> Stepper:
            stepper = request.param(capacity)
            if isinstance(stepper, GatedLoop | GatedPool):
                stack.callback(stepper.network.gate.release, 1000)
                stack.enter_context(stepper.engine)
                stack.callback(stepper.network.gate.release, 1000)
            return stepper  # type: ignore[no-any-return]  # of the parameters above

        yield made


ROOMY = Capacity(rows=4, tokens=1000)
ONE = Capacity(rows=1, tokens=1000)


def rows(*specs: Spec) -> list[Row]:
    return [tiny_flux.row(FAMILY, spec) for spec in specs]


def names(found: tuple[Row, ...]) -> list[tuple[str, int]]:
    return [(row.key.job_id, row.step) for row in found]


def stepped(stepper: Stepper) -> list[tuple[str, int]]:
    stepper.begin()
    return names(stepper.finish().advanced)


def test_rows_join_at_the_next_step_and_leave_at_their_last(make: Make) -> None:
    made = make(ROOMY)
    assert made.engine.submit(rows(Spec("a", steps=2)))
    made.begin()
    assert made.engine.submit(rows(Spec("b", steps=1)))  # while a step runs
    assert names(made.finish().advanced) == [("a", 1)]
    made.begin()
    report = made.finish()
    assert [(row.key.job_id, row.step, row.done) for row in report.advanced] == [
        ("a", 2, True),
        ("b", 1, True),
    ]
    assert report.ended_s >= report.began_s
    state = made.engine.state()
    assert (state.running, state.waiting) == ((), ())


def test_the_state_tells_running_rows_from_waiting_ones(make: Make) -> None:
    made = make(ONE)
    made.engine.submit(rows(Spec("a"), Spec("b")))
    made.begin()
    state = made.engine.state()
    assert (names(state.running), names(state.waiting)) == ([("a", 0)], [("b", 0)])
    assert state.began_s is not None
    made.finish()
    assert names(made.engine.state().running) == [("a", 1)]


def test_a_key_is_taken_once(make: Make) -> None:
    made = make(ROOMY)
    made.engine.submit(rows(Spec("a")))
    with pytest.raises(ValueError, match="is in the batch already"):
        made.engine.submit(rows(Spec("a")))
    made.engine.cancel("a")
    assert made.engine.submit(rows(Spec("a")))


def test_a_row_cancelled_while_its_step_runs_is_reported_no_more(make: Make) -> None:
    made = make(ROOMY)
    made.engine.submit(rows(Spec("a", steps=3), Spec("b", steps=1)))
    made.begin()
    assert names(made.engine.cancel("a")) == [("a", 0)]
    assert names(made.engine.state().running) == [("b", 0)]
    assert names(made.finish().advanced) == [("b", 1)]
    assert made.engine.cancel("a") == ()


def test_one_attempt_is_cancelled_and_the_other_goes_on(make: Make) -> None:
    made = make(ROOMY)
    made.engine.submit(rows(Spec("a", attempt=1), Spec("a", attempt=2, seed=1)))
    assert [row.key.attempt for row in made.engine.cancel("a", 1)] == [1]
    made.begin()
    assert [row.key.attempt for row in made.finish().advanced] == [2]
    assert [row.key.attempt for row in made.engine.cancel("a")] == [2]


def test_all_rows_of_edits_are_taken_as_of_their_last_step_and_no_more_are_accepted(make: Make) -> None:
    """A template run is dropped: another worker begins it again."""
    made = make(ONE)
    recording = RecordingSpec(frozenset({CacheForm.KV}), 0)
    run = replace(tiny_flux.row(FAMILY, Spec("run")), records=recording)
    made.engine.submit([*rows(Spec("a", steps=3), Spec("b")), run])
    assert stepped(made) == [("a", 1)]
    made.begin()
    taken = made.engine.take_all()
    assert [(row.key.job_id, row.export().step) for row in taken] == [("a", 1), ("b", 0)]
    assert not made.engine.submit(rows(Spec("c")))
    assert made.engine.take_all() == ()
    assert made.finish().advanced == ()


def test_a_taken_row_goes_on_elsewhere(make: Make) -> None:
    made, elsewhere = make(ROOMY), make(ROOMY)
    made.engine.submit(rows(Spec("a", steps=3)))
    stepped(made)
    (taken,) = made.engine.take_all()
    elsewhere.engine.submit([tiny_flux.row(FAMILY, Spec("a", steps=3), resume=taken.export())])
    assert [stepped(elsewhere) for _ in range(2)] == [[("a", 2)], [("a", 3)]]


@pytest.mark.parametrize("count", [1, 3])
def test_many_threads_may_submit(make: Make, count: int) -> None:
    made = make(ROOMY)
    threads = [
        threading.Thread(
            target=made.engine.submit,
            args=[rows(*(Spec(f"{thread}-{index}", steps=1) for index in range(count)))],
        )
        for thread in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HUNG_S)
    seen: list[tuple[str, int]] = []
    while len(seen) < 4 * count:
        seen += stepped(made)
    assert sorted(seen) == sorted((f"{thread}-{i}", 1) for thread in range(4) for i in range(count))
