"""A ControlNet service's configuration: all mistakes in one report."""

from __future__ import annotations

import socket

import pytest

from giornata.config import load
from giornata.gpus import DeviceLedger
from giornata.runtime import memory_bytes
from giornata_controlnet.config import ControlNetConfig


def config(*flags: str) -> ControlNetConfig:
    return load(ControlNetConfig, "controlnet", ["--controlnets", "edges=/nets/edges", *flags])


def test_every_mistake_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GIORNATA_CONTROLNETS", raising=False)
    flags = [
        "--control-address",
        "here",
        "--control-memory-mb",
        "-1",
        "--control-socket",
        f"/{'x' * 80}",
        "--device",
        "tpu",
    ]
    with pytest.raises(SystemExit, match="2"):
        load(ControlNetConfig, "controlnet", flags)
    told = capsys.readouterr().err
    assert "5 configuration mistake(s)" in told
    for name in ("CONTROLNETS", "CONTROL_ADDRESS", "CONTROL_MEMORY_MB", "CONTROL_SOCKET", "DEVICE"):
        assert f"GIORNATA_{name} " in told


@pytest.mark.parametrize("controlnets", ["", " , ", "a=/x,a=/y", "../a=/x"])
def test_a_service_has_something_to_compute(controlnets: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        load(ControlNetConfig, "controlnet", ["--controlnets", controlnets])


def test_what_is_advertised_can_be_reached() -> None:
    assert config().tcp is None
    everywhere = config("--control-address", "0.0.0.0:9001")
    assert everywhere.tcp == ("0.0.0.0", 9001)  # noqa: S104 - compared, not bound
    assert everywhere.advertised("0.0.0.0:9001") == f"{socket.gethostname()}:9001"
    assert config("--control-address", "[::]:0").tcp == ("::", 0)
    assert config("--control-address", "10.0.0.7:1").advertised("10.0.0.7:1") == "10.0.0.7:1"
    assert config("--control-address", "[::1]:1").advertised("[::1]:1") == "[::1]:1"


def test_weights_take_half_of_the_memory_unless_they_are_told_how_much() -> None:
    assert config("--device", "cpu").budget_bytes(DeviceLedger()) == memory_bytes() // 2
    assert config("--control-memory-mb", "0").budget_bytes(DeviceLedger()) == 0
    assert config("--control-memory-mb", "3").budget_bytes(DeviceLedger()) == 3 << 20
