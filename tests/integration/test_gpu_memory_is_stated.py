"""Services on a GPU state what they need before they load a model: with a device that CUDA pretends to have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from giornata.device_claims import DeviceLedger
from giornata.model_cards import model_memory, read_model_card
from giornata.wire.devices import HostDevice
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
    monkeypatch.setattr(denoiser, "controlled", lambda *_: None)
    monkeypatch.setattr(
        denoiser, "replace", lambda found, **parts: SimpleNamespace(**{**vars(found), **parts})
    )
    monkeypatch.setattr(denoiser, "check", lambda *_: None)
    config = {"model": str(folder), "device": "cuda", "device_ledger": tmp_path / "ledger"}
    opened = [
        denoiser.open_checkpoint(DenoiserConfig.model_validate(config | {"quantize": how}))
        for how in ("off", "int8")
    ]
    whole, fewer = (model_memory(folder, quantized=how) for how in (False, True))
    first, both = whole.denoiser(1024**2), whole.denoiser(1024**2) + fewer.denoiser(1024**2)
    assert seen == [first, both], "stated before anything is loaded"
    assert all(one.ledger.gpu == "GPU-a" for one in opened)


def test_a_prepost_plans_beside_it_before_it_loads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, plans = DeviceLedger(tmp_path / "ledger", "GPU-a", "denoiser"), []
    other.state(62 * GB)

    def family(*arguments: Any) -> Any:
        plans.append((arguments[-1], other.others_bytes()))

    monkeypatch.setattr(prepost, "FAMILIES", {read_model_card(folder).family: family})
    config = {"model": str(folder), "device": "cuda", "device_ledger": tmp_path / "ledger"}
    prepost.open_model(PrepostConfig.model_validate(config))
    [(plan, stated)] = plans
    assert (plan.encoders, plan.size_bytes) == (True, stated)
    other.state(70 * GB)
    prepost.open_model(PrepostConfig.model_validate(config))
    assert not plans[1][0].encoders, "its predecessor, which states still, and the denoiser leave no room"
