"""The engine's thread: how it ends. What it owes the service is in :mod:`tests.contract.test_row_engine`."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from giornata.scheduling.batch import Capacity
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loop import EngineLoop
from giornata_denoiser.engine.low_ranks import LowRanks
from giornata_denoiser.engine.protocol import StepReport
from giornata_denoiser.families.flux.checkpoints import FluxInpaint
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec
from tests.patience import HUNG_S

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
