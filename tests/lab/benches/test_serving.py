"""The systems whose latency is compared: each serves every edit once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.protocol import StepReport
from giornata_lab.bench.compute.models import TINY, flux
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.bench.compute.static_batching import StaticBatching
from giornata_lab.bench.compute.workload import Arrival, edits
from giornata_lab.bench.latency import served
from giornata_lab.bench.systems.prepost import Array, Coder, CoderProcess
from giornata_lab.bench.systems.serving import SYSTEMS
from giornata_lab.bench.systems.serving_parts import Parts

CPU = torch.device("cpu")


class Inline(CoderProcess):
    """No process: the work is done where it is asked for."""

    def __init__(self, coder: Coder) -> None:
        self._coder = coder

    def encode(self, pixels: Array, then: Callable[[Array], object]) -> None:
        then(self._coder.encode(pixels))

    def decode(self, latents: Array, pixels: int, then: Callable[[object], object]) -> Any:
        then(self._coder.decode(latents, pixels))


@pytest.fixture(scope="module")
def parts() -> Parts:
    rows = Rows(flux(TINY, torch.float32, CPU), side=4, text_tokens=3)
    coder = Coder(torch.float32, CPU)
    return Parts(rows, StaticBatching(rows, coder.model), coder, Inline(coder), batch=2)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_request_is_served(parts: Parts, name: str) -> None:
    drawn = edits(4, {1: 1.0, 3: 1.0}, templates=1, seed=0)
    trace = [Arrival(0.0, tuple(drawn[:3])), Arrival(0.01, (drawn[3],))]
    latencies = served(name, parts, trace)
    assert len(latencies) == 2
    assert min(latencies) > 0


def test_request_level_batching_lets_nobody_join_a_batch_that_runs(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[list[int]] = []
    settle = Engine.settle

    def seen(engine: Engine, report: StepReport) -> StepReport:
        steps.append([row.step for row in report.advanced])
        return settle(engine, report)

    monkeypatch.setattr(Engine, "settle", seen)
    parts.rows.template(0)
    steps.clear()
    served("request-level, reuse", parts, [Arrival(0.0, tuple(edits(4, {2: 1.0}, templates=1, seed=0)))])
    assert steps, "the engine was used"
    assert all(len(set(now)) == 1 for now in steps), "rows of a step began together"
