"""`giornata up` hands on the profile that lies in its folder, if it is of what it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from giornata.model_cards import digest
from giornata_tools.checkout import TRAINED
from giornata_tools.launcher.model import Model
from giornata_tools.launcher.up import profile_env
from tests.fakes.profiles import PROFILE

CHOSEN = Model(str(TRAINED), None)
OURS = {"model_digest": digest(TRAINED), "device": "a processor, threads: 2"}


@pytest.mark.parametrize("device", ["a processor, threads: 2", "a GPU"])
def test_a_profile_of_the_model_is_handed_on(tmp_path: Path, device: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.model_copy(update={**OURS, "device": device}).model_dump_json())
    assert profile_env(path, CHOSEN, 2, {}) == {"GIORNATA_PROFILE": str(path)}


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
    assert profile_env(path, CHOSEN, 2, env) == {}
    assert profile_env(path, Model("a/hub-id", None), 2, {}) == {}
