"""Services on a GPU state what they need before they load a model: with a device that CUDA pretends to have."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from giornata.gpus import DeviceLedger
from giornata.model_cards import CONTEXT_BYTES, TILE, USABLE, model_memory, read_model_card
from giornata.wire.workers import HostDevice
from giornata_controlnet.config import ControlNetConfig
from giornata_denoiser import checkpoint as denoiser
from giornata_denoiser.config import DenoiserConfig
from giornata_prepost import checkpoint as prepost
from giornata_prepost.config import PrepostConfig
from tests.fakes.published import published

GB = 10**9


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A published checkpoint, beside a GPU of 80 GB."""
    for module in (denoiser, prepost):
        monkeypatch.setattr(module, "host_device", lambda _: HostDevice(device="cuda:0", id="GPU-a"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (80 * GB, 80 * GB))
    return published(tmp_path / "flux", "flux")


def test_a_denoiser_states_its_network_and_a_row(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, seen = DeviceLedger(tmp_path / "ledger", "GPU-a", "prepost"), []
    made = SimpleNamespace(family=SimpleNamespace(network=None), card=read_model_card(folder))

    def load(*_: Any, **__: Any) -> Any:
        seen.append(other.others_bytes())
        return made

    monkeypatch.setattr(denoiser, "load", load)
    monkeypatch.setattr(denoiser, "control_target", lambda *_: None)
    monkeypatch.setattr(
        denoiser, "replace", lambda found, **parts: SimpleNamespace(**{**vars(found), **parts})
    )
    monkeypatch.setattr(denoiser, "check", lambda *_: None)
    config = {"model": str(folder), "device": "cuda", "device_ledger": tmp_path / "ledger"}
    asked: list[dict[str, Any]] = [{}, {"quantize": "int8"}, {"dtype": "float32"}]
    opened = [denoiser.open_checkpoint(DenoiserConfig.model_validate(config | more)) for more in asked]
    models = [model_memory(folder), model_memory(folder, quantized=True), model_memory(folder, 4)]
    sizes = [model.denoiser(1024**2) for model in models]
    assert seen == list(accumulate(sizes)), "stated before anything is loaded"
    assert [(one.ledger.gpu, one.memory) for one in opened] == [("GPU-a", model) for model in models]
    (folder / "transformer" / "model.safetensors").unlink()  # what it takes is not asked without a ledger
    alone = denoiser.open_checkpoint(DenoiserConfig.model_validate(config | {"device_ledger": None}))
    assert (alone.ledger.folder, alone.memory) == (None, None)


def test_a_prepost_plans_beside_it_before_it_loads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, plans = DeviceLedger(tmp_path / "ledger", "GPU-a", "denoiser"), []
    other.state(62 * GB)
    model = model_memory(folder)

    def family(*arguments: Any) -> Any:
        assert other.others_bytes() == model.prepost(TILE**2, encoders=False), "the least, before the plan"
        plans.append(arguments[-1])

    monkeypatch.setattr(prepost, "FAMILIES", {read_model_card(folder).family: family})
    config = {"model": str(folder), "device": "cuda", "device_ledger": tmp_path / "ledger"}
    prepost.open_model(PrepostConfig.model_validate(config))
    predecessor = DeviceLedger(tmp_path / "ledger", "GPU-a", "prepost")
    predecessor.state(model.prepost(1024**2, encoders=True))
    assert not plans[0]().encoders, "its predecessor and the denoiser leave no room"
    predecessor.state(0)  # as if it had ended
    assert plans[0]().encoders
    assert other.others_bytes() == model.prepost(1024**2, encoders=True)


def test_a_prepost_in_float32_plans_with_numbers_of_four_bytes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Any] = []
    monkeypatch.setattr(
        prepost, "FAMILIES", {read_model_card(folder).family: lambda *arguments: plans.append(arguments[-1])}
    )
    config = {"model": str(folder), "device": "cuda", "dtype": "float32"}
    prepost.open_model(PrepostConfig.model_validate(config))
    assert plans[0]().size_bytes == model_memory(folder, 4).prepost(1024**2, encoders=True)


def test_a_controlnet_service_takes_half_of_what_is_free_and_not_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, denoiser = (DeviceLedger(tmp_path, "GPU-a", name) for name in ("controlnet", "denoiser"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (50 * GB, 80 * GB))
    config = ControlNetConfig.model_validate({"controlnets": "edges=/nets/edges", "device": "cuda"})
    assert config.budget_bytes(ledger) == 25 * GB
    denoiser.state(60 * GB)  # of which it has filled 30
    beside = config.budget_bytes(ledger)
    assert beside == (USABLE * 80 * GB - CONTEXT_BYTES - 60 * GB) // 2
    assert denoiser.others_bytes() == CONTEXT_BYTES + beside
    denoiser.state(90 * GB)
    assert config.budget_bytes(ledger) == 0
    assert config.model_copy(update={"control_memory_mb": 7}).budget_bytes(ledger) == 7 << 20
    assert denoiser.others_bytes() == CONTEXT_BYTES + (7 << 20)
