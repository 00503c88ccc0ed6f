"""The engine's thread: it computes what is submitted, answers at once, and ends cleanly."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from giornata.scheduling.batch import Capacity
from giornata_denoiser.engine.engine import Engine, StepReport
from giornata_denoiser.engine.loop import EngineLoop
from giornata_denoiser.families.flux.inpaint import FluxInpaint
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec

WAIT_S = 20.0
SMALL = Capacity(rows=2, tokens=1000)


class Gated(FluxInpaint):
    """A family whose steps wait for `gate`, and that tells when one has begun; it can lose its device."""

    def __init__(self) -> None:
        super().__init__(tiny_flux.transformer())
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.lost = False

    def model_input(self, latent: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:
        self.begun.release()
        assert self.gate.acquire(timeout=WAIT_S)
        if self.lost:
            raise torch.AcceleratorError("the device is gone", 1)
        return super().model_input(latent, conditioning)


class Harness:
    """A loop over a gated family and what it reported."""

    def __init__(self, capacity: Capacity = SMALL) -> None:
        self.family = Gated()
        self.reports: queue.Queue[StepReport] = queue.Queue()
        self.crashes: queue.Queue[Exception] = queue.Queue()
        engine = Engine(self.family, capacity, time.monotonic)
        self.loop = EngineLoop(engine, self.reports.put, self.crashes.put)

    def submit(self, *specs: Spec) -> bool:
        return self.loop.submit([tiny_flux.row(self.family, spec) for spec in specs])

    def begun(self) -> None:
        assert self.family.begun.acquire(timeout=WAIT_S)

    def report(self) -> list[tuple[str, int]]:
        report = self.reports.get(timeout=WAIT_S)
        return [(row.key.job_id, row.step) for row in report.advanced]


def test_rows_join_at_the_next_step_and_leave_at_their_last() -> None:
    made = Harness()
    with made.loop:
        assert made.submit(Spec("a", steps=2))
        made.begun()
        assert made.submit(Spec("b", steps=1))  # while a step runs
        made.family.gate.release(10)
        assert [made.report(), made.report()] == [[("a", 1)], [("a", 2), ("b", 1)]]
    assert made.reports.empty()


def test_the_state_shows_who_runs_and_who_waits() -> None:
    made = Harness(Capacity(rows=1, tokens=1000))
    with made.loop:
        made.submit(Spec("a"))
        made.begun()
        made.submit(Spec("b"))
        state = made.loop.state()
        assert [row.key.job_id for row in state.running] == ["a"]
        assert [row.key.job_id for row in state.waiting] == ["b"]
        made.family.gate.release(10)


def test_cancel_is_answered_while_a_step_runs() -> None:
    made = Harness()
    with made.loop:
        made.submit(Spec("a", steps=3), Spec("b", steps=1))
        made.begun()
        assert [row.key.job_id for row in made.loop.cancel("a")] == ["a"]
        made.family.gate.release(10)
        assert made.report() == [("b", 1)]
    assert made.reports.empty()


def test_take_all_hands_rows_over_and_refuses_more() -> None:
    made = Harness(Capacity(rows=1, tokens=1000))
    with made.loop:
        made.submit(Spec("a", steps=3), Spec("b"))
        made.begun()
        made.family.gate.release()
        assert made.report() == [("a", 1)]
        made.begun()
        taken = made.loop.take_all()
        assert [(row.key.job_id, row.export().step) for row in taken] == [("a", 1), ("b", 0)]
        assert not made.submit(Spec("c"))
        made.family.gate.release(10)
    assert made.reports.get(timeout=WAIT_S).advanced == ()


def test_leaving_ends_after_the_running_step_and_keeps_the_rest() -> None:
    made = Harness()
    with made.loop:
        made.submit(Spec("a", steps=5))
        made.begun()
        made.family.gate.release()
        assert made.report() == [("a", 1)]
        made.begun()
        threading.Timer(0.05, made.family.gate.release).start()
    (row,) = made.loop.take_all()
    assert row.step == 2


def test_a_lost_device_is_told_and_keeps_the_rows() -> None:
    made = Harness()
    made.family.lost = True
    made.family.gate.release(10)
    with made.loop:
        made.submit(Spec("a"))
        assert isinstance(made.crashes.get(timeout=WAIT_S), torch.AcceleratorError)
        assert not made.submit(Spec("b"))
        assert [row.key.job_id for row in made.loop.take_all()] == ["a"]


def test_an_idle_loop_ends_at_once() -> None:
    with Harness().loop:
        pass


@pytest.mark.parametrize("rows", [1, 3])
def test_many_threads_may_submit(rows: int) -> None:
    made = Harness(Capacity(rows=4, tokens=1000))
    made.family.gate.release(1000)
    with made.loop:
        threads = [
            threading.Thread(target=made.submit, args=[Spec(f"{thread}-{i}", steps=1) for i in range(rows)])
            for thread in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen: list[str] = []
        while len(seen) < 4 * rows:
            seen += [name for name, _ in made.report()]
    assert sorted(seen) == sorted(f"{thread}-{i}" for thread in range(4) for i in range(rows))
