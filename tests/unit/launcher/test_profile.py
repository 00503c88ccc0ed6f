"""`giornata up` hands on the profile that lies in its folder, if it is of what it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from giornata.model_cards import digest
from giornata_tools.checkout import TRAINED
from giornata_tools.launcher.models import StackModel
from giornata_tools.launcher.process import LaunchError
from giornata_tools.launcher.up import profiled
from tests.fakes.profiles import PROFILE

CHOSEN = StackModel(str(TRAINED))
OURS = {"model_digest": digest(TRAINED), "device": "a processor, threads: 2"}


@pytest.mark.parametrize("device", ["a processor, threads: 2", "a GPU"])
def test_a_profile_of_the_model_is_handed_on(tmp_path: Path, device: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.model_copy(update={**OURS, "device": device}).model_dump_json())
    assert profiled(path, (CHOSEN,), 2, {}) == (replace(CHOSEN, env={"GIORNATA_PROFILE": str(path)}),)


@pytest.mark.parametrize(
    ("content", "env"),
    [
        (None, {}),
        ("{}", {}),
        ("[", {}),
        (PROFILE.model_copy(update={**OURS, "model_digest": "another"}).model_dump_json(), {}),
        (PROFILE.model_copy(update={**OURS, "device": "a processor, threads: 4"}).model_dump_json(), {}),
        (PROFILE.model_copy(update=OURS).model_dump_json(), {"GIORNATA_PROFILE": "other.json"}),
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
    path.write_text(PROFILE.model_copy(update=OURS).model_dump_json())
    ours = replace(CHOSEN, env={"GIORNATA_PROFILE": str(path)})
    assert profiled(path, (CHOSEN, hub), 2, {}) == (ours, hub)
    named = {"GIORNATA_PROFILE": str(path)}
    unset = replace(hub, env={"GIORNATA_PROFILE": ""})
    assert profiled(tmp_path / "other.json", (CHOSEN, hub), 2, named) == (ours, unset)
    with pytest.raises(LaunchError, match="is of none of the models"):
        profiled(path, (hub, hub), 2, named)
