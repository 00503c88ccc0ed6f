"""The studio's form has the fields and limits of requests."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import annotated_types
import pytest

import giornata_gateway
from giornata.wire.adapters import MAX_CONTROLNETS, MAX_LORAS, MAX_SCALE, Annotator, LoraWait
from giornata.wire.models import WARMUP, StepCache
from giornata.wire.requests import EditParameters

STATIC = Path(giornata_gateway.__file__).parent / "static"
PAGE = (STATIC / "index.html").read_text(encoding="utf-8")
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


def test_adapters_have_the_limits_and_the_choices_of_requests() -> None:
    loras, nets, cards = (
        (STATIC / "js" / f"{name}.js").read_text(encoding="utf-8")
        for name in ("loras", "controlnets", "cards")
    )
    assert f"const MOST = {MAX_LORAS};" in loras
    assert f"const MOST = {MAX_CONTROLNETS};" in nets
    assert f"scale(name, {-MAX_SCALE:g})" in loras
    assert f"max: {MAX_SCALE:g}" in cards
    (annotators,) = re.findall(r"const ANNOTATORS = (.*);", nets)
    assert re.findall(r'\["(\w+)"', annotators) == list(Annotator)
    section = FORM[FORM.index('id="lora-wait"') :].partition("</select>")[0]
    assert re.findall(r'value="(\w+)"', section) == list(LoraWait)


def test_what_saves_steps_has_the_choices_and_the_defaults_of_requests() -> None:
    (caches,) = re.findall(
        r"const CACHES = \{(.*?)\};", (STATIC / "js" / "speed.js").read_text("utf-8"), re.DOTALL
    )
    assert re.findall(r'^ *"?([\w-]+)"?: \[', caches, re.MULTILINE) == list(StepCache)
    assert CONTROLS["step_cache_warmup"]["placeholder"] == str(WARMUP)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_have_the_limits_of_their_field(name: str) -> None:
    told: dict[type, Any] = {type(limit): limit for limit in EditParameters.model_fields[name].metadata}
    least, most = float(CONTROLS[name]["min"]), float(CONTROLS[name]["max"])
    if annotated_types.Gt in told:
        assert math.isclose(least, told[annotated_types.Gt].gt, abs_tol=0.01)
        assert least > told[annotated_types.Gt].gt
    else:
        assert least == told[annotated_types.Ge].ge
    assert most == min(told[annotated_types.Le].le, 2**53 - 1), "the largest that JavaScript holds"


def test_no_door_has_a_feather_that_nobody_asked_for() -> None:
    """Outside of the mask every pixel is the original's by default, at the studio and in ComfyUI too."""
    assert EditParameters(prompt="x").mask_blur is None
    assert "value" not in CONTROLS["mask_blur"]
    node = (Path(__file__).parents[3] / "deploy" / "comfyui" / "nodes.py").read_text("utf-8")
    assert '"mask_blur": _number("FLOAT", -1.0, -1.0,' in node, "the gateway's own"
