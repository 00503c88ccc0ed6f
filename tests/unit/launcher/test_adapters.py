"""`giornata up` offers the adapters that ship with the trained model, where nobody names others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from giornata.wire.workers import ServiceName
from giornata_lab.model.adapters import card
from giornata_tools.checkout import TRAINED
from giornata_tools.cli.system import up
from giornata_tools.launcher.models import LORAS, NETS, StackModel, shared_loras, with_controlnets
from giornata_tools.launcher.up import UpOptions, plan

OURS, OTHER = StackModel(str(TRAINED)), StackModel("a/hub-id")


def test_the_trained_model_is_served_with_the_controlnets_that_ship() -> None:
    kept = replace(OURS, env={"GIORNATA_PROFILE": "p"})
    ours, other = with_controlnets((kept, OTHER), {})
    (folder,) = map(Path, ours.env[NETS].split(","))
    assert folder == card.read("outline").file.parent
    assert ours.env["GIORNATA_PROFILE"] == "p"
    assert other == OTHER


def test_the_folder_of_shared_loras_is_that_of_the_trained_model() -> None:
    folder = Path(shared_loras((OTHER, OURS), {})[LORAS])
    assert folder / TRAINED.name / "swapped.safetensors" == card.read("swapped").file


@pytest.mark.parametrize("model", [OTHER, replace(OURS, name="mine")], ids=["another", "renamed"])
def test_loras_are_for_models_by_name(model: StackModel) -> None:
    assert shared_loras((model,), {}) == {}


@pytest.mark.parametrize("named", ["", "/adapters"])
def test_what_the_environment_names_is_left_to_it(named: str) -> None:
    assert with_controlnets((OURS,), {NETS: named}) == (OURS,)
    assert shared_loras((OURS,), {LORAS: named}) == {}


def test_up_tells_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (NETS, LORAS):
        monkeypatch.delenv(name, raising=False)
    asked = plan(UpOptions(**up.make_context("up", []).params), (OURS,))
    assert asked.models[0].env[NETS]
    assert asked.env_of[ServiceName.LORA_STORE][LORAS]
