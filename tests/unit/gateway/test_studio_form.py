"""The studio's form: every control is a field of requests, and has that field's limits."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import annotated_types
import pytest

import giornata_gateway
from giornata.wire.requests import EditParameters

PAGE = (Path(giornata_gateway.__file__).parent / "static" / "index.html").read_text(encoding="utf-8")
FORM = PAGE[PAGE.index('<form id="edit"') : PAGE.index("</form>")]
CONTROLS = {
    attributes["name"]: attributes
    for tag in re.findall(r"<(?:input|select|textarea) [^>]*>", FORM)
    if "name" in (attributes := dict(re.findall(r'([\w-]+)="([^"]*)"', tag)))
}
NUMBERS = sorted(name for name, control in CONTROLS.items() if control.get("type") == "number")


def test_every_control_is_shown_by_the_field_that_it_sets() -> None:
    assert CONTROLS.keys() <= EditParameters.model_fields.keys()
    assert CONTROLS.keys() - {"model", "prompt"} <= set(re.findall(r'data-field="(\w+)"', FORM))
    assert {
        "negative_prompt",
        "guidance_scale",
        "true_cfg_scale",
        "sampler",
        "reuse",
        "size",
    } <= CONTROLS.keys()
    for control in CONTROLS.values():
        assert f'<label for="{control["id"]}"' in FORM
        assert f'id="{control["id"]}-error"' in FORM


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_have_the_limits_of_their_field(name: str) -> None:
    told: dict[type, Any] = {type(limit): limit for limit in EditParameters.model_fields[name].metadata}
    least, most = float(CONTROLS[name]["min"]), float(CONTROLS[name]["max"])
    if annotated_types.Gt in told:
        assert math.isclose(least, told[annotated_types.Gt].gt, abs_tol=0.01)
        assert least > told[annotated_types.Gt].gt
    else:
        assert least == told[annotated_types.Ge].ge
    assert most == told[annotated_types.Le].le
