"""`giornata up` makes masks from words where the model that ships is served, and nobody says what makes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from giornata.wire.workers import ServiceName
from giornata_lab.demo.demo import DemoOptions
from giornata_lab.demo.demo import plan as demo_plan
from giornata_tools.checkout import SEGMENTER, TRAINED
from giornata_tools.cli.system import up
from giornata_tools.launcher.models import MASKS, REFINER, StackModel, shipped_masks
from giornata_tools.launcher.plan import StackPlan
from giornata_tools.launcher.up import UpOptions, plan

OURS, OTHER = StackModel(str(TRAINED)), StackModel("a/hub-id")
SHIPPED = {MASKS: str(SEGMENTER)}


@pytest.mark.parametrize("models", [(OURS,), (replace(OURS, name="mine"),), (OURS, replace(OURS, name="b"))])
def test_the_trained_model_is_served_with_the_segmenter_that_ships(models: tuple[StackModel, ...]) -> None:
    assert shipped_masks(models, {REFINER: ""}) == SHIPPED


@pytest.mark.parametrize("models", [(OTHER,), (OURS, OTHER)], ids=["another", "beside another"])
def test_nothing_is_said_of_another_models_pictures(models: tuple[StackModel, ...]) -> None:
    assert shipped_masks(models, {}) == {}


@pytest.mark.parametrize("said", [{MASKS: ""}, {MASKS: "a/segmenter"}, {REFINER: "a/refiner"}])
def test_what_the_environment_says_is_left_to_it(said: dict[str, str]) -> None:
    assert shipped_masks((OURS,), said) == {}


def planned_up(model: StackModel, _: Path) -> StackPlan:
    return plan(UpOptions(**up.make_context("up", []).params), (model,))


def planned_demo(model: StackModel, folder: Path) -> StackPlan:
    return demo_plan(DemoOptions(None, 1, folder, steps=1, seed=0, no_oracle=True), model, folder)


@pytest.mark.parametrize("planned", [planned_up, planned_demo])
def test_up_and_demo_tell_prepost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planned: object) -> None:
    assert callable(planned)
    for name in (MASKS, REFINER):
        monkeypatch.delenv(name, raising=False)
    assert planned(OURS, tmp_path).env_of[ServiceName.PREPOST] == SHIPPED
    assert planned(OTHER, tmp_path).env_of[ServiceName.PREPOST] == {}
    monkeypatch.setenv(MASKS, "")
    assert planned(OURS, tmp_path).env_of[ServiceName.PREPOST] == {}
