"""What prepost has of a GPU beside others: in whatever order they start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from giornata.gpus import DeviceLedger
from giornata.memory_plan import TILE, USABLE, ModelMemory, PrepostPlan
from giornata.model_cards import model_memory, read_model_card
from giornata.wire.models import ModelCard
from giornata_prepost.checkpoint import plan_memory
from giornata_prepost.config import PrepostConfig
from tests.fakes.published import published

GB = 10**9
SIDE = 1024


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return published(tmp_path / "qwen-image", "qwen-image")


@pytest.fixture
def card(folder: Path) -> ModelCard:
    return read_model_card(folder)


@pytest.fixture
def model(folder: Path) -> ModelMemory:
    return model_memory(folder)


def config(**options: Any) -> PrepostConfig:
    return PrepostConfig.model_validate({"model": "m", "model_pixels": SIDE**2} | options)


def test_alone_on_a_gpu_it_takes_what_it_needs(model: ModelMemory, card: ModelCard) -> None:
    plan = plan_memory(config(), model, card, DeviceLedger(), 24 * GB)
    assert plan == PrepostPlan(encoders=True, whole_pixels=SIDE**2, size_bytes=plan.size_bytes)
    assert 20 * GB < plan.size_bytes < USABLE * 24 * GB


@pytest.mark.parametrize("first", ["denoiser", "prepost"])
@pytest.mark.parametrize(("size_gb", "encoders"), [(80, True), (64, False)])
def test_encoders_make_room_for_the_denoiser_whoever_starts_first(
    first: str, size_gb: int, encoders: bool, model: ModelMemory, card: ModelCard, tmp_path: Path
) -> None:
    folder = tmp_path / "ledger"
    denoiser = DeviceLedger(folder, "GPU-a", "denoiser") if first == "denoiser" else None
    if denoiser is not None:
        denoiser.state(model.denoiser(SIDE**2))
    plan = plan_memory(config(), model, card, DeviceLedger(folder, "GPU-a", "prepost"), size_gb * GB)
    denoiser = denoiser or DeviceLedger(folder, "GPU-a", "denoiser")
    assert plan.encoders is encoders
    assert denoiser.others_bytes() == plan.size_bytes
    assert plan.size_bytes + model.denoiser(SIDE**2) <= USABLE * size_gb * GB


def test_a_denoiser_of_another_gpu_takes_nothing_here(
    model: ModelMemory, card: ModelCard, tmp_path: Path
) -> None:
    elsewhere = DeviceLedger(tmp_path / "ledger", "GPU-b", "denoiser")
    elsewhere.state(model.denoiser(SIDE**2))
    assert plan_memory(
        config(), model, card, DeviceLedger(tmp_path / "ledger", "GPU-a", "prepost"), 24 * GB
    ).encoders


def test_large_pictures_pass_in_tiles_where_there_is_no_room(model: ModelMemory, card: ModelCard) -> None:
    large = config(model_pixels=2048**2)
    plan = plan_memory(large, model, card, DeviceLedger(), 12 * GB)
    assert not plan.encoders
    assert SIDE**2 < plan.whole_pixels < 2048**2
    assert plan_memory(large, model, card, DeviceLedger(), GB).whole_pixels == TILE**2


def test_what_is_asked_for_is_done(model: ModelMemory, card: ModelCard) -> None:
    assert plan_memory(config(text_encoders="device"), model, card, DeviceLedger(), GB).encoders
    assert not plan_memory(config(text_encoders="cpu"), model, card, DeviceLedger(), 80 * GB).encoders
