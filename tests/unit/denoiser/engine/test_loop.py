"""The engine's thread: how it ends, and rows whose adapters are not here yet."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from giornata.packed.low_rank import SequenceLoras
from giornata.scheduling.batch import Capacity
from giornata_denoiser.engine.batch_tensors import LoraPart, LowRanks
from giornata_denoiser.engine.engine import Engine, EngineLoop
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.rows.parts import Adapters, RowLora
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.patience import HUNG_S
from tests.unit.denoiser.engine.test_masked import OF

# The engine's thread: how it ends. What it owes the service is in :mod:`tests.contract.test_row_engine`.


SMALL = Capacity(rows=2, tokens=1000)


class Gated(FluxInpaint):
    """A network whose steps wait for `gate`, and that tells when one has begun; it can lose its device."""

    def __init__(self) -> None:
        super().__init__(tiny_flux.transformer())
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.lost = False

    def model_input(self, latents: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:
        self.begun.release()
        assert self.gate.acquire(timeout=HUNG_S)
        if self.lost:
            raise torch.AcceleratorError("the device is gone", 1)
        return super().model_input(latents, conditioning)


class GatedLoop:
    """A loop over a gated network, whose steps a test begins and ends."""

    def __init__(self, capacity: Capacity = SMALL, low_ranks: LowRanks | None = None) -> None:
        self.network = Gated()
        self.family = tiny_flux.family(self.network)
        self.reports: queue.Queue[StepReport] = queue.Queue()
        self.crashes: queue.Queue[Exception] = queue.Queue()
        self.engine = EngineLoop(
            Engine(self.family, capacity, time.monotonic, low_ranks=low_ranks),
            self.reports.put,
            self.crashes.put,
        )

    def submit(self, *specs: Spec) -> bool:
        return self.engine.submit([tiny_flux.row(self.family, spec) for spec in specs])

    def begin(self) -> None:
        assert self.network.begun.acquire(timeout=HUNG_S)

    def finish_once_left(self) -> None:
        """Let the running step end when the loop has been told to leave."""
        with self.engine._condition:
            assert self.engine._condition.wait_for(lambda: self.engine._stopping, HUNG_S)
        self.network.gate.release()

    def finish(self) -> StepReport:
        self.network.gate.release()
        return self.reports.get(timeout=HUNG_S)


def test_leaving_ends_after_the_running_step_and_keeps_the_rest() -> None:
    made = GatedLoop()
    with made.engine:
        made.submit(Spec("a", steps=5))
        made.begin()
        assert [row.step for row in made.finish().advanced] == [1]
        made.begin()
        threading.Thread(target=made.finish_once_left).start()
    (row,) = made.engine.take_all()
    assert row.step == 2


def test_a_lost_device_is_told_and_keeps_the_rows() -> None:
    made = GatedLoop()
    made.network.lost = True
    made.network.gate.release(10)
    with made.engine:
        made.submit(Spec("a"))
        assert isinstance(made.crashes.get(timeout=HUNG_S), torch.AcceleratorError)
        assert not made.submit(Spec("b"))
        assert [row.key.job_id for row in made.engine.take_all()] == ["a"]


def test_an_idle_loop_ends_at_once() -> None:
    with GatedLoop().engine:
        pass


# Rows that wait for LoRAs, and rows that begin without them.


LORAS = (RowLora("a" * 64),)
PLAIN = tiny_flux.row(OF, Spec("x"))


class ResidentLoraSets:
    """Sets that a test loads."""

    def __init__(self) -> None:
        self.here: set[tuple[RowLora, ...]] = set()
        self._changes_nothing = SequenceLoras("empty", {})

    def find(self, loras: tuple[RowLora, ...]) -> SequenceLoras | None:
        return self._changes_nothing if loras in self.here else None


def adapted(row: Row, loras_from: int = 0) -> Row:
    return replace(row, adapters=Adapters(LORAS, loras_from))


@given(step=st.integers(0, 5), loras_from=st.integers(0, 6), here=st.booleans())
def test_a_row_whose_request_tells_the_step_takes_its_loras_there(
    step: int, loras_from: int, *, here: bool
) -> None:
    shelf = ResidentLoraSets()
    shelf.here = {LORAS} if here else set()
    adapters = Adapters(LORAS, loras_from, joins_early=False)
    row = changed(PLAIN, adapters=adapters, step=step, corrections=())
    assert LoraPart(shelf).able(row) == (row if here or step < loras_from else None)


@given(step=st.integers(0, 5), loras_from=st.integers(0, 6), here=st.booleans())
def test_a_row_goes_on_while_it_may_and_takes_its_loras_at_the_first_boundary(
    step: int, loras_from: int, *, here: bool
) -> None:
    shelf = ResidentLoraSets()
    shelf.here = {LORAS} if here else set()
    row = changed(adapted(PLAIN, loras_from), step=step, corrections=())
    now = LoraPart(shelf).able(row)
    if not here and step >= loras_from:
        assert now is None
        return
    assert now is not None
    joins = here and step < loras_from
    assert now.adapters.loras_from == (step if joins else loras_from)
    assert (now.reuse.corrections is None) == joins, "what was learned without them is void"


@pytest.fixture
def shelf() -> ResidentLoraSets:
    return ResidentLoraSets()


@pytest.fixture
def gated(shelf: ResidentLoraSets) -> GatedLoop:
    return GatedLoop(low_ranks=shelf)


def test_a_row_waits_for_its_loras_while_others_go_on(gated: GatedLoop, shelf: ResidentLoraSets) -> None:
    late, other = (tiny_flux.row(gated.family, Spec(name)) for name in ("late", "other"))
    with gated.engine as loop:
        loop.submit([adapted(late), other])
        gated.begin()
        assert [row.key.job_id for row in loop.state().running] == ["other"]
        shelf.here.add(LORAS)
        loop.resume("late", 1)
        gated.network.gate.release(1000)
        done = _ended(gated, 2)
        assert loop.paused == 1
    assert done["late"].adapters.loras_from == 0
    alone = _alone(tiny_flux.row(gated.family, Spec("late")))
    torch.testing.assert_close(done["late"].latent, alone, rtol=1e-4, atol=1e-5)


def test_a_row_that_waits_for_a_second_input_is_counted_once(
    gated: GatedLoop, shelf: ResidentLoraSets
) -> None:
    late, other = (tiny_flux.row(gated.family, Spec(name, steps=8)) for name in ("late", "other"))
    with gated.engine as loop:
        loop.submit([adapted(late), other])
        gated.begin()
        for _ in range(3):  # something else has come
            loop.resume("late", 1)
            gated.finish()
            gated.begin()
        counted = loop.paused
        shelf.here.add(LORAS)
        loop.resume("late", 1)
        gated.finish()
        gated.network.gate.release(1000)
        _ended(gated, 2)
    assert counted == loop.paused == 1


def test_the_loop_sleeps_while_all_rows_wait_and_wakes_for_the_first(
    gated: GatedLoop, shelf: ResidentLoraSets
) -> None:
    gated.network.gate.release(1000)
    with gated.engine as loop:
        loop.submit([adapted(tiny_flux.row(gated.family, Spec("late")))])
        assert not loop.state().running
        shelf.here.add(LORAS)
        loop.resume("late", 1)
        assert _ended(gated, 1)["late"].done


def test_a_bounded_row_pauses_at_its_bound(gated: GatedLoop, shelf: ResidentLoraSets) -> None:
    row = adapted(tiny_flux.row(gated.family, Spec("x")), loras_from=2)
    with gated.engine as loop:
        loop.submit([row])
        for _ in range(2):
            gated.begin()
            gated.network.gate.release()
            last = gated.reports.get(timeout=HUNG_S).advanced[0]
        assert last.step == 2
        loop.submit([tiny_flux.row(gated.family, Spec("other"))])
        gated.begin()
        assert [(row.key.job_id, row.step) for row in loop.state().waiting] == [("x", 2)]
        shelf.here.add(LORAS)
        loop.resume("x", 1)
        gated.network.gate.release(1000)
        assert _ended(gated, 2)["x"].adapters.loras_from == 2


def test_a_row_that_waits_can_be_cancelled_and_taken(gated: GatedLoop) -> None:
    with gated.engine as loop:
        loop.submit([adapted(tiny_flux.row(gated.family, Spec(name))) for name in ("a", "b")])
        assert [row.key.job_id for row in loop.cancel("a")] == ["a"]
        loop.resume("a", 1)  # too late, and harmless
        assert [row.key.job_id for row in loop.take_all()] == ["b"]


def _ended(gated: GatedLoop, count: int) -> dict[str, Row]:
    done: dict[str, Row] = {}
    while len(done) < count:
        report = gated.reports.get(timeout=HUNG_S)
        assert not report.failed
        done |= {row.key.job_id: row for row in report.advanced if row.done}
    return done


def _alone(row: Row) -> torch.Tensor:
    gated = GatedLoop()
    gated.network.gate.release(1000)
    with gated.engine as loop:
        loop.submit([row])
        return _ended(gated, 1)[row.key.job_id].latent
