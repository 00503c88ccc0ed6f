"""`giornata up` hands on what ships with the trained model, where nobody names others, and its folder's profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from giornata.model_cards import digest
from giornata.wire.workers import ServiceName
from giornata_lab.demo.demo import DemoOptions
from giornata_lab.demo.demo import plan as demo_plan
from giornata_lab.model.adapters import lessons
from giornata_tools.checkout import SEGMENTER, TRAINED
from giornata_tools.cli.system import up
from giornata_tools.launcher.models import (
    LORAS,
    MASKS,
    NETS,
    REFINER,
    StackModel,
    shared_loras,
    shipped_masks,
    with_controlnets,
)
from giornata_tools.launcher.plan import StackPlan
from giornata_tools.launcher.process import LaunchError
from giornata_tools.launcher.up import UpOptions, plan, profiled
from tests.fakes.profiles import PROFILE

OURS, OTHER = StackModel(str(TRAINED)), StackModel("a/hub-id")


def test_the_trained_model_is_served_with_the_controlnets_that_ship() -> None:
    kept = replace(OURS, env={"GIORNATA_PROFILE": "p"})
    ours, other = with_controlnets((kept, OTHER), {})
    (folder,) = map(Path, ours.env[NETS].split(","))
    assert folder == lessons.read_card("outline").file.parent
    assert ours.env["GIORNATA_PROFILE"] == "p"
    assert other == OTHER


def test_the_folder_of_shared_loras_is_that_of_the_trained_model() -> None:
    folder = Path(shared_loras((OTHER, OURS), {})[LORAS])
    assert folder / TRAINED.name / "swapped.safetensors" == lessons.read_card("swapped").file


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


# Masks from words, where the model that ships is served and nobody says what makes them.


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


# The profile that lies in its folder, if it is of what it starts.


CHOSEN = StackModel(str(TRAINED))
FITTING = {"model_digest": digest(TRAINED), "device": "a processor, threads: 2"}


@pytest.mark.parametrize("device", ["a processor, threads: 2", "a GPU"])
def test_a_profile_of_the_model_is_handed_on(tmp_path: Path, device: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.model_copy(update={**FITTING, "device": device}).model_dump_json())
    assert profiled(path, (CHOSEN,), 2, {}) == (replace(CHOSEN, env={"GIORNATA_PROFILE": str(path)}),)


@pytest.mark.parametrize(
    ("content", "env"),
    [
        (None, {}),
        ("{}", {}),
        ("[", {}),
        (PROFILE.model_copy(update={**FITTING, "model_digest": "another"}).model_dump_json(), {}),
        (PROFILE.model_copy(update={**FITTING, "device": "a processor, threads: 4"}).model_dump_json(), {}),
        (PROFILE.model_copy(update=FITTING).model_dump_json(), {"GIORNATA_PROFILE": "other.json"}),
    ],
    ids=["missing", "empty", "broken", "another model", "other threads", "one is named"],
)
def test_any_other_is_not(tmp_path: Path, content: str | None, env: dict[str, str]) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    hub = StackModel("a/hub-id")
    assert profiled(path, (CHOSEN,), 2, env) == (CHOSEN,)
    assert profiled(path, (hub,), 2, {}) == (hub,)


def test_of_several_models_each_gets_its_own_profile_or_none(tmp_path: Path) -> None:
    path, hub = tmp_path / "profile.json", StackModel("a/hub-id")
    path.write_text(PROFILE.model_copy(update=FITTING).model_dump_json())
    ours = replace(CHOSEN, env={"GIORNATA_PROFILE": str(path)})
    assert profiled(path, (CHOSEN, hub), 2, {}) == (ours, hub)
    named = {"GIORNATA_PROFILE": str(path)}
    unset = replace(hub, env={"GIORNATA_PROFILE": ""})
    assert profiled(tmp_path / "other.json", (CHOSEN, hub), 2, named) == (ours, unset)
    with pytest.raises(LaunchError, match="is of none of the models"):
        profiled(path, (hub, hub), 2, named)
