"""What a denoiser is configured with reaches its engine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch

from giornata.gpus import DeviceLedger
from giornata.model_cards import CONTEXT_BYTES, USABLE, ModelMemory, plan_prepost
from giornata.planning.cost_model import CostModel
from giornata.planning.operations import StepWork
from giornata.planning.plans import plan_each_alone, uniform_modes
from giornata.runtime import memory_bytes
from giornata.scheduling.batch import BatchingMode
from giornata.wire.values import BlockMode
from giornata_denoiser import startup
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.rows.row import Row
from giornata_denoiser.startup import MemoryBudget, engine_of, memory_of, memory_on, shared_memory
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.configs import configured
from tests.contract.messages import CARD
from tests.fakes.profiles import PROFILE, Steady
from tests.unit.denoiser.engine.edits import GRID, edit, finished, template
from tests.unit.denoiser.engine.test_masked import OF


def config(**options: Any) -> DenoiserConfig:
    return configured(DenoiserConfig, model="tiny", **options)


def edited(rows: list[Row] | None = None, **options: Any) -> tuple[dict[str, Row], CostModel]:
    """Rows by an engine that is configured so; by default one that takes from its own picture's template."""
    checkpoint: Any = SimpleNamespace(family=OF, preview_map=None, card=CARD, controlnets={})
    model = Steady.of(PROFILE)
    with engine_of(config(**options), checkpoint, PROFILE, model) as engine:
        if rows is None:
            taken = template(OF, frozenset(CacheForm))
            rows = [edit(OF, taken, Spec("edit", grid=GRID, steps=4, seed=1))]
        engine.batch.submit(rows)
        return finished(engine), model


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner whose choice follows no loads."""
    monkeypatch.setattr(startup, "plan_batch", plan_each_alone(uniform_modes(BlockMode.KV)))


@pytest.mark.usefixtures("fixed")
def test_whether_a_first_step_is_computed_in_full_is_configured() -> None:
    with_it, without = (edited(template_correction=on, template_bits=0)[0]["edit"] for on in (True, False))
    assert not torch.allclose(with_it.latent, without.latent, atol=1e-3)


def test_steps_and_loads_reach_the_cost_model() -> None:
    _, model = edited([tiny_flux.row(OF, Spec("long", grid=GRID, steps=20))])
    assert model.state.compute.samples + model.state.compute.outliers >= 16
    _, model = edited()
    for _ in range(40):
        model.observe_step(StepWork(1.0, 10.0, 0.0, 100.0), 1.0)
    assert model.state.load.samples + model.state.load.outliers > 0


def steps_of(rows: list[Row], **options: Any) -> list[list[str]]:
    """Who shared every step."""
    checkpoint: Any = SimpleNamespace(family=OF, preview_map=None, card=CARD, controlnets={})
    profile = PROFILE.model_copy(update={"activation_bytes": 1e5, "even_bytes": None})
    with engine_of(config(**options), checkpoint, profile, Steady.of(PROFILE)) as engine:
        engine.batch.submit(rows)
        shared = []
        while (report := engine.step()) is not None:
            shared.append([row.key.job_id for row in report.advanced])
        return shared


def three() -> list[Row]:
    return [
        tiny_flux.row(OF, Spec(name, grid=GRID, steps=steps))
        for name, steps in (("a", 1), ("b", 2), ("c", 1))
    ]


def test_batching_is_configured() -> None:
    assert steps_of(three(), capacity_rows=2) == [["a", "b"], ["b", "c"]]
    assert steps_of(three(), capacity_rows=2, batching=BatchingMode.REQUEST) == [["a", "b"], ["b"], ["c"]]


def test_a_limit_of_memory_lets_rows_run_alone() -> None:
    assert steps_of(three()) == [["a", "b", "c"], ["b"]]
    assert steps_of(three(), memory_mb=1) == [["a"], ["b"], ["b"], ["c"]]


def test_budgets_follow_the_machine_unless_they_are_configured() -> None:
    host, gpu = memory_bytes(), 56 << 30
    on_cpu, on_gpu = memory_of(config(), None), memory_of(config(), gpu)
    assert on_cpu.templates == on_gpu.templates == 4 * (7 * host // 16 >> 20) // 7 << 20
    assert (on_cpu.device, on_cpu.ahead, on_cpu.rows) == (0, host // 16, math.inf)
    assert (on_gpu.device, on_gpu.ahead) == (14 << 30, 7 << 30)
    assert on_gpu.device + on_gpu.rows == pytest.approx(0.9 * gpu)
    own = memory_of(config(template_memory_mb=1, template_device_mb=2, memory_mb=4), gpu)
    assert own == MemoryBudget(1 << 20, 2 << 20, 7 << 30, 4 << 20)


def on_gpu(ledger: DeviceLedger, memory: ModelMemory | None = None) -> Any:
    """A checkpoint on a GPU."""
    family = SimpleNamespace(device=torch.device("cuda"))
    return SimpleNamespace(family=family, ledger=ledger, memory=memory, card=CARD)


def test_a_gpu_is_divided_once_what_others_have_stated_is_left_out(tmp_path: Path) -> None:
    """Whether they have taken it or not: free memory alone would tell of what they have taken."""
    denoiser, prepost, elsewhere = (
        DeviceLedger(tmp_path, gpu, service)
        for gpu, service in (("GPU-a", "denoiser"), ("GPU-a", "prepost"), ("GPU-b", "prepost"))
    )
    elsewhere.state(30 << 30)
    total, own, checkpoint = 80 << 30, 25 << 30, on_gpu(denoiser)
    alone = shared_memory(config(), checkpoint, total - own, total, own)
    prepost.state(20 << 30)
    before, after = (
        shared_memory(config(), checkpoint, free, total, own)
        for free in (total - own, total - own - (20 << 30))  # prepost has loaded nothing yet; everything
    )
    assert before == after
    assert alone.device + alone.rows == pytest.approx(0.9 * 51 * 2**30)
    assert before.device + before.rows == pytest.approx(0.9 * 31 * 2**30)
    assert prepost.others_bytes() == pytest.approx(own + before.device + before.rows, abs=1)
    scarce = shared_memory(config(), checkpoint, 3 << 30, total, own)
    assert scarce.device + scarce.rows == pytest.approx(0.9 * 3 * 2**30), "a stranger has taken more"
    prepost.state(70 << 30)
    assert shared_memory(config(), checkpoint, total - own, total, own).rows == 0


FLUX = ModelMemory(24 << 30, 10 << 30, 200 << 20, 1600.0, 111e3, 256.0, 512)


@pytest.mark.parametrize(("free_gb", "encoders"), [(55, True), (12, False)])
def test_room_is_left_for_a_prepost_that_comes_later(free_gb: int, encoders: bool, tmp_path: Path) -> None:
    """With its text encoders where they fit beside a row; where a prepost has stated something, that holds."""
    ledger, pixels = DeviceLedger(tmp_path, "GPU-a", "denoiser"), CARD.native_size**2
    free, total, own = free_gb << 30, 80 << 30, (76 - free_gb) << 30
    coming = FLUX.prepost(pixels, encoders=encoders)

    def taken() -> float:
        memory = shared_memory(config(), on_gpu(ledger, FLUX), free, total, own)
        return memory.device + memory.rows

    assert taken() == pytest.approx(0.9 * (free - coming))
    prepost = DeviceLedger(tmp_path, "GPU-a", "prepost")
    assert plan_prepost(USABLE * total - prepost.others_bytes(), FLUX, pixels).size_bytes == coming
    prepost.state(1 << 30)
    assert taken() == pytest.approx(0.9 * (free - (1 << 30)))


def test_no_room_is_left_where_the_prepost_of_the_host_has_another_gpu(tmp_path: Path) -> None:
    ledger, _elsewhere = (
        DeviceLedger(tmp_path, gpu, service) for gpu, service in (("GPU-a", "denoiser"), ("GPU-b", "prepost"))
    )
    memory = shared_memory(config(), on_gpu(ledger, FLUX), 50 << 30, 80 << 30, 20 << 30)
    assert memory.device + memory.rows == pytest.approx(0.9 * (50 << 30))


def test_what_cuda_tells_of_its_memory_is_divided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (50 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 24 << 30)
    ledger, prepost = (DeviceLedger(tmp_path, "GPU-a", name) for name in ("denoiser", "prepost"))
    prepost.state(10 << 30)
    gpu = on_gpu(ledger)
    spared = 2 << 30
    own = CONTEXT_BYTES + (24 << 30) + spared
    assert memory_on(config(), gpu, spared) == shared_memory(config(), gpu, 48 << 30, 80 << 30, own)
    cpu: Any = SimpleNamespace(family=SimpleNamespace(device=torch.device("cpu")), ledger=DeviceLedger())
    assert memory_on(config(), cpu).rows == math.inf


@pytest.mark.parametrize(("memory_mb", "told"), [(1 << 20, []), (0, ["0 of 4"])])
def test_a_budget_too_small_for_a_template_is_told_at_the_start(memory_mb: int, told: list[str]) -> None:
    checkpoint: Any = SimpleNamespace(family=OF, preview_map=None, card=CARD, controlnets={})
    small = config(template_memory_mb=memory_mb)
    with (
        structlog.testing.capture_logs() as logs,
        engine_of(small, checkpoint, PROFILE, CostModel.of(PROFILE)),
    ):
        pass
    assert [log["event"] for log in logs if log["event"] == "budgets"] == ["budgets"]
    assert [log["blocks"] for log in logs if log["event"] == "template_budget_small"] == told


def test_a_trace_is_written_at_the_end(tmp_path: Path) -> None:
    edited(trace_folder=tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"steps", "compute", "load"} <= {event["cat"] for event in events if event["ph"] == "X"}
