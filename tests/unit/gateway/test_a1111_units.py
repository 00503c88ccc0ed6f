"""Units of A1111's extension for ControlNets, and titles of models."""

from __future__ import annotations

import base64
from contextlib import suppress
from typing import Any

import pytest
import webuiapi
from hypothesis import given
from hypothesis import strategies as st

from giornata.wire.adapters import Annotator, AskedControl
from giornata.wire.errors import BadRequest
from giornata_gateway.rules.a1111_forms import HARMLESS, hash_of, model_of, title_of, unlabelled
from giornata_gateway.rules.a1111_parameters import (
    MODULES,
    NEUTRAL,
    ControlNetUnitForm,
    RequestedControlNets,
    controls_of,
)
from tests.fakes.fleet import CARD

ONE, OTHER = (base64.b64encode(data).decode() for data in (b"one", b"other"))


def scripts(*units: object) -> dict[str, Any]:
    return {"ControlNet": {"args": list(units)}}


def test_units_become_controlnets_and_their_images_are_counted() -> None:
    controls = controls_of(
        scripts(
            {"model": "canny", "module": "Canny"},
            {
                "model": "lines [0123abcd]",
                "image": ONE,
                "weight": 0.5,
                "guidance_start": 0.2,
                "guidance_end": 0.8,
            },
            {"model": "depth", "input_image": f"data:image/png;base64,{OTHER}", "module": None},
            {"model": "unread", "enabled": False, "module": "openpose", "image": "?"},
            {},
        )
    )
    assert controls.images == (b"one", b"other")
    assert [AskedControl.model_validate(control) for control in controls.asked] == [
        AskedControl(model="canny", annotator=Annotator.CANNY),
        AskedControl(model="lines", image=0, scale=0.5, start=0.2, end=0.8),
        AskedControl(model="depth", image=1),
    ]


def test_scripts_that_are_off_ask_for_nothing() -> None:
    off = {
        "ADetailer": {"args": [False]},
        "animatediff": {"args": []},
        "reactor": {},
        "controlnet": {"args": [{}]},
        "Soft Inpainting": {"args": [False, 1, 0.5, 4]},
        "Sampler": {"args": [20, "Euler a", "Automatic"]},
    }
    assert controls_of(off) == RequestedControlNets()
    assert controls_of({}) == RequestedControlNets()


def test_every_neutral_value_of_a_unit_is_accepted_and_no_other() -> None:
    plain = {"model": "lines", "image": ONE}
    expected = controls_of(scripts(plain))
    assert not ControlNetUnitForm.model_fields.keys() & NEUTRAL.keys()
    for name, values in NEUTRAL.items():
        for value in (*values, None):
            assert controls_of(scripts(plain | {name: value})) == expected
        if name in HARMLESS:
            continue
        with pytest.raises(BadRequest) as refused:
            controls_of(scripts(plain, plain | {name: "something"}))
        assert refused.value.field == f"alwayson_scripts.controlnet.args.1.{name}"
    assert {Annotator(each) for each in MODULES.values() if each} == set(Annotator)


def test_defaults_of_clients_are_accepted_and_what_a_user_chose_is_not() -> None:
    plain = {"model": "canny", "module": "canny", "image": ONE}
    expected = controls_of(scripts(plain))
    extension = {
        "processor_res": -1,
        "threshold_a": -1,
        "threshold_b": -1,
        "save_detected_map": True,
        "hr_option": "Both",
    }
    published = webuiapi.ControlNetUnit(module="canny", model="canny").to_dict() | {"image": ONE}
    assert controls_of(scripts(plain | extension)) == controls_of(scripts(published)) == expected
    for name, chosen in {
        "processor_res": 768, "threshold_a": 30, "control_mode": "My prompt is more important", "mask_image": ONE,
    }.items():  # fmt: skip
        with pytest.raises(BadRequest, match=name) as refused:
            controls_of(scripts(published | {name: chosen}))
        assert refused.value.field == f"alwayson_scripts.controlnet.args.0.{name}"


def test_fields_that_change_nothing_are_ignored_and_told() -> None:
    unit = {"model": "lines", "image": ONE, "low_vram": True, "colour": 1, "hr_option": "High res only"}
    assert controls_of(scripts({}, {"model": "lines", "image": ONE}, unit)).ignored == (
        "alwayson_scripts.controlnet.args.1.low_vram",
        "alwayson_scripts.controlnet.args.1.colour",
    )


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (scripts(*[{"model": "a", "image": ONE}] * 4), "alwayson_scripts.ControlNet.args"),
        (scripts("canny"), "alwayson_scripts.ControlNet.args"),
        ({"controlnet": {"args": {"model": "a"}}}, "alwayson_scripts.controlnet.args"),
        (scripts({"image": ONE}), "alwayson_scripts.controlnet.args.0.model"),
        (scripts({"model": "a", "image": "?"}), "alwayson_scripts.controlnet.args.0.image"),
        (
            scripts({"model": "a", "image": {"image": ONE, "mask": ONE}}),
            "alwayson_scripts.controlnet.args.0.image",
        ),
        (scripts({"model": "a", "image": ONE, "weight": 5}), "alwayson_scripts.controlnet.args.0.weight"),
        ({"soft inpainting": {"args": [True]}}, "alwayson_scripts.soft inpainting"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_place(given: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        controls_of(given)
    assert refused.value.field == field


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from([*ControlNetUnitForm.model_fields, *NEUTRAL, "args"]), inner)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["ControlNet", "controlnet", "other"]), JSON))
def test_any_scripts_are_units_or_one_of_our_errors(given: dict[str, Any]) -> None:
    with suppress(BadRequest):
        controls_of(given)


def test_a_model_is_named_by_title_name_file_or_hash() -> None:
    cards = {CARD.name: CARD}
    for label in (
        title_of(CARD),
        "tiny",
        "tiny.safetensors",
        "tiny.ckpt [abc]",
        hash_of(CARD),
        CARD.digest,
        " tiny ",
    ):
        assert model_of(label, cards) == "tiny"
    assert model_of("v1-5 [e1441589a6]", cards) == "v1-5"


@given(st.text())
def test_any_label_has_a_name_that_is_its_beginning(label: str) -> None:
    assert label.strip().startswith(unlabelled(label)) or unlabelled(label) == label
