"""From A1111's requests to edits: fields, prompts with LoRAs, units of the extension for ControlNets."""

from __future__ import annotations

import base64
import re
from contextlib import suppress
from typing import Any

import pytest
import webuiapi
from hypothesis import given
from hypothesis import strategies as st

from giornata.families import Family
from giornata.wire.adapters import Annotator, AskedControl, AskedLora
from giornata.wire.errors import BadRequest, InvalidField, LoraNotFound
from giornata.wire.loras import LoraRecord, LoraState
from giornata.wire.models import DISCRETE_TIME, ModelCard, Sampler
from giornata.wire.requests import EditParameters, MaskMode, Reuse
from giornata.wire.resolution import resolve
from giornata_gateway.rules import a1111_forms as forms
from giornata_gateway.rules.a1111_forms import (
    HARMLESS,
    Emphasis,
    ImageToImage,
    LoraTag,
    Settings,
    TextToImage,
    hash_of,
    model_of,
    named,
    read,
    split,
    title_of,
    unlabelled,
)
from giornata_gateway.rules.a1111_parameters import (
    MODULES,
    NAMES,
    NEUTRAL,
    ControlNetUnitForm,
    RequestedControlNets,
    controls_of,
    parameters_of,
    rename_field,
    sampler_of,
    unused_fields,
)
from tests.fakes.fleet import CARD

SD = CARD.model_copy(
    update={
        "name": "sd",
        "family": Family.SD,
        "guided_above": 1.0,
        "samplers": DISCRETE_TIME,
        "default_sampler": Sampler.PNDM,
        "native_size": 512,
        "keeps_whole_steps": True,
    }
)
TRUE_CFG = CARD.model_copy(update={"name": "flux", "takes_true_cfg": True})
SCHNELL = CARD.model_copy(update={"name": "schnell", "takes_guidance": False})
PLAIN = {"prompt": "a star", "init_images": ["cGljdHVyZQ=="]}
MASKED = PLAIN | {"mask": "bWFzaw=="}


def edit(card: ModelCard = CARD, /, **fields: Any) -> EditParameters:
    form, _ = read(ImageToImage, PLAIN | fields)
    parameters = parameters_of(form, card, (), RequestedControlNets())
    resolve(parameters, card, 0)  # the model takes what it is asked for
    return parameters


def made(card: ModelCard = SD, /, **fields: Any) -> EditParameters:
    form, _ = read(TextToImage, {"prompt": "a star"} | fields)
    return parameters_of(form, card, (), RequestedControlNets())


def test_what_is_left_out_is_the_models_own() -> None:
    parameters = edit()
    assert parameters == EditParameters(prompt="a star", model="tiny", strength=0.75)
    assert made() == EditParameters(prompt="a star", model="sd", strength=1.0, reuse=Reuse.OFF)


@pytest.mark.parametrize(
    ("fields", "strength", "crop", "mode", "blur", "size"),
    [
        ({}, 1.0, 0, MaskMode.WHITE, None, "auto"),
        ({"inpainting_fill": 1}, 0.75, 0, MaskMode.WHITE, None, "auto"),
        ({"inpainting_fill": 1, "denoising_strength": 0.3}, 0.3, 0, MaskMode.WHITE, None, "auto"),
        ({"inpainting_fill": 2, "denoising_strength": 1}, 1.0, 0, MaskMode.WHITE, None, "auto"),
        ({"inpainting_fill": 3}, 1.0, 0, MaskMode.WHITE, None, "auto"),
        ({"inpaint_full_res_padding": 32, "mask_blur": 0}, 1.0, 32, MaskMode.WHITE, 0.0, "auto"),
        ({"mask_blur_x": 6, "mask_blur_y": 6}, 1.0, 0, MaskMode.WHITE, 6.0, "auto"),
        ({"inpaint_full_res": False, "inpainting_mask_invert": 1}, 1.0, None, MaskMode.BLACK, None, "auto"),
        ({"inpaint_full_res": 0, "width": 640, "height": 480}, 1.0, None, MaskMode.WHITE, None, "640x480"),
        ({"width": 512, "height": 512}, 1.0, 0, MaskMode.WHITE, None, "auto"),
        ({"width": 1024, "height": 1024}, 1.0, 0, MaskMode.WHITE, None, "auto"),
    ],
)
def test_a_mask_is_painted_as_a1111_would(
    fields: dict[str, Any], strength: float, crop: int | None, mode: MaskMode, blur: float | None, size: str
) -> None:
    told = edit(mask="bWFzaw==", **fields)
    assert (told.strength, told.padding_mask_crop, told.mask_mode) == (strength, crop, mode)
    assert (told.mask_blur, told.size) == (blur, size)


def test_fields_of_the_mask_mean_nothing_without_one() -> None:
    told = edit(inpainting_fill=0, denoising_strength=0.4, inpaint_full_res=True, width=640, height=480)
    assert (told.strength, told.padding_mask_crop, told.mask_mode) == (0.4, None, MaskMode.AUTO)
    assert told.size == "640x480"


@pytest.mark.parametrize(
    ("card", "fields", "told"),
    [
        (SD, {"cfg_scale": 4}, (4.0, None)),
        (SD, {"cfg_scale": 4, "distilled_cfg_scale": 3.5, "negative_prompt": "blue"}, (4.0, None)),
        (SD, {}, (None, None)),
        (CARD, {"cfg_scale": 7}, (None, None)),
        (CARD, {"cfg_scale": 1, "distilled_cfg_scale": 3.5}, (3.5, None)),
        (TRUE_CFG, {"cfg_scale": 7}, (None, None)),
        (TRUE_CFG, {"cfg_scale": 4, "negative_prompt": "blue"}, (None, 4.0)),
        (TRUE_CFG, {"cfg_scale": 7, "negative_prompt": "blue", "distilled_cfg_scale": 2}, (2.0, 7.0)),
        (SCHNELL, {"cfg_scale": 1, "distilled_cfg_scale": 3.5}, (None, None)),
    ],
)
def test_guidance_is_what_the_model_means_by_it(
    card: ModelCard, fields: dict[str, Any], told: tuple[float | None, float | None]
) -> None:
    parameters = edit(card, **fields)
    assert (parameters.guidance_scale, parameters.true_cfg_scale) == told
    assert parameters.negative_prompt == fields.get("negative_prompt")


@pytest.mark.parametrize(
    ("card", "fields", "field"),
    [
        (CARD, {"cfg_scale": 4}, "cfg_scale"),
        (TRUE_CFG, {"cfg_scale": 4}, "cfg_scale"),
        (TRUE_CFG, {"cfg_scale": 1, "negative_prompt": "blue"}, "cfg_scale"),
        (SCHNELL, {"distilled_cfg_scale": 4}, "distilled_cfg_scale"),
        (SD, {"distilled_cfg_scale": 4}, "distilled_cfg_scale"),
        (SD, {"sampler_name": "Euler", "scheduler": "karras"}, "sampler_name"),
        (SD, {"sampler_name": "DPM2"}, "sampler_name"),
        (SD, {"sampler_name": "Euler", "scheduler": "simple"}, "sampler_name"),
        (CARD, {"sampler_name": "Euler", "scheduler": "beta"}, "sampler_name"),
        (CARD, {"sampler_name": "Heun"}, "sampler_name"),
        (CARD, MASKED | {"width": 640, "height": 640}, "width"),
    ],
)
def test_what_the_model_does_not_do_is_refused(card: ModelCard, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        edit(card, **fields)
    assert refused.value.field == field
    assert refused.value.received
    assert refused.value.accepted


@pytest.mark.parametrize("sampler", NAMES)
def test_every_sampler_has_a_name(sampler: Sampler) -> None:
    named, card = NAMES[sampler], SD.model_copy(update={"samplers": tuple(Sampler)})
    assert sampler_of(named.name, named.scheduler.title(), card) is sampler
    assert sampler_of(sampler, None, card) is sampler
    if named.automatic:
        assert sampler_of(named.name.upper(), "Automatic", card) is sampler


def test_names_of_samplers_are_those_of_all_versions() -> None:
    assert NAMES.keys() == set(Sampler)
    assert sampler_of("DPM++ 2M Karras", None, SD) is Sampler.DPMPP_2M_KARRAS
    assert sampler_of("DPM++ 2M", "uniform", SD) is Sampler.DPMPP_2M
    assert sampler_of(None, "automatic", SD) is None
    assert sampler_of(None, "uniform", SD) is Sampler.PNDM
    assert sampler_of("Euler a", "automatic", CARD) is None  # the client's default
    assert sampler_of("DDIM", "normal", CARD) is None  # SillyTavern's
    assert sampler_of("Euler", "Simple", CARD) is Sampler.EULER  # Forge's for Flux
    assert sampler_of("DDIM", "normal", SD) is Sampler.DDIM
    form, _ = read(TextToImage, {"prompt": "x", "sampler_name": "Heun", "sampler_index": "Euler"})
    assert form.sampler == "Heun"


@pytest.mark.parametrize("kind", [TextToImage, ImageToImage])
def test_neutral_values_are_accepted_and_nothing_else(kind: type[TextToImage]) -> None:
    body = PLAIN if kind is ImageToImage else {"prompt": "a star"}
    assert not kind.model_fields.keys() & (kind.asks_nothing.keys() | kind.unread.keys())
    for name, values in kind.asks_nothing.items():
        for value in (*values, None):
            assert read(kind, body | {name: value}) == read(kind, body), name
        if name in forms.HARMLESS:
            assert read(kind, body | {name: "something"}) == (read(kind, body)[0], (name,))
            continue
        with pytest.raises(InvalidField) as refused:
            read(kind, body | {name: "something"})
        assert (refused.value.field, refused.value.received) == (name, "'something'")
    for name in kind.unread:
        assert read(kind, body | {name: [1]}) == read(kind, body)


@pytest.mark.parametrize("kind", [TextToImage, ImageToImage])
def test_unknown_fields_are_ignored_and_told(kind: type[TextToImage]) -> None:
    settings = {"sd_model_checkpoint": "tiny", "jpeg_quality": 80, "sd_checkpoint_hash": "d" * 64}
    given = {"prompt": "x", "init_images": ["eA=="], "colour": "red", "auth": "me:secret"}
    body = {
        name: value for name, value in given.items() if name in kind.model_fields or name != "init_images"
    }
    form, ignored = read(kind, body | {"override_settings": settings})
    assert ignored == ("colour", "auth", "override_settings.jpeg_quality")
    assert form.override_settings == Settings(sd_model_checkpoint="tiny")


@pytest.mark.parametrize(
    ("card", "fields", "unused"),
    [
        (CARD, {"cfg_scale": 7, "sampler_name": "Euler a", "distilled_cfg_scale": 3}, ["cfg_scale", "sampler_name"]),
        (CARD, {"cfg_scale": 1, "sampler_name": "Euler"}, []),
        (TRUE_CFG, {"cfg_scale": 4, "negative_prompt": "blue"}, []),
        (SD, {"cfg_scale": 7, "distilled_cfg_scale": 3.5, "sampler_name": "Euler a"}, ["distilled_cfg_scale"]),
        (CARD, MASKED | {"denoising_strength": 0.75, "width": 512, "height": 512},
         ["denoising_strength", "width", "height"]),
        (CARD, MASKED | {"denoising_strength": 0.75, "inpainting_fill": 1, "inpaint_full_res": False, "width": 64,
                         "height": 64}, []),
        (CARD, MASKED, []),
    ],
)  # fmt: skip
def test_defaults_of_clients_that_change_nothing_are_told(
    card: ModelCard, fields: dict[str, Any], unused: list[str]
) -> None:
    form, _ = read(ImageToImage, PLAIN | fields)
    assert unused_fields(form, card, parameters_of(form, card, (), RequestedControlNets())) == unused


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
FIELDS = (*ImageToImage.model_fields, *forms.IMAGE_TO_IMAGE, *forms.UNREAD_BOTH)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_body_becomes_parameters_or_one_of_our_errors(fields: dict[str, Any]) -> None:
    with suppress(BadRequest):
        form, _ = read(ImageToImage, PLAIN | fields)
        parameters_of(form, SD, (), RequestedControlNets())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("controlnets.mode", "alwayson_scripts.controlnet"), ("size", "width"), ("mask", "mask"), (None, None)],
)
def test_errors_of_jobs_get_a1111s_names(ours: str | None, theirs: str | None) -> None:
    error = InvalidField(field=ours)
    rename_field(error)
    assert error.field == theirs


def test_what_was_received_is_told_shortly() -> None:
    with pytest.raises(InvalidField) as refused:
        read(TextToImage, {"prompt": "a star", "styles": ["oil" * 100] * 100_000})
    assert len(refused.value.received or "") < 200


# LoRAs and other syntax in a prompt of A1111.


LORA_NAMES = st.text(st.characters(exclude_characters="<>:", exclude_categories=("Cc", "Cs")), min_size=1)
WORDS = st.text(st.characters(exclude_characters="<>()[]:\\", exclude_categories=("Cc", "Cs"))).filter(
    lambda text: not re.search("AND|BREAK", text)
)


def record(letter: str, name: str | None, **changes: object) -> LoraRecord:
    fields = {"tenant": "alice", "created_s": 0, "state": LoraState.READY, "model": CARD.name}
    return LoraRecord.model_validate({"lora_id": f"lora_{letter * 32}", "name": name} | fields | changes)


@given(st.lists(st.tuples(WORDS, LORA_NAMES, st.floats(-4, 4).map(lambda scale: round(scale, 3)))), WORDS)
def test_tags_are_taken_out_and_read(tagged: list[tuple[str, str, float]], last: str) -> None:
    prompt = "".join(f"{words}<lora:{name}:{scale}>" for words, name, scale in tagged) + last
    words, tags = split(prompt, "prompt")
    assert tags == [LoraTag(name, scale) for _, name, scale in tagged]
    assert words.split() == [
        word for text in (*(words for words, _, _ in tagged), last) for word in text.split()
    ]
    assert tagged or words == prompt


def test_a_tag_without_weight_acts_as_trained() -> None:
    assert split("<lora:rims>a star", "prompt") == ("a star", [LoraTag("rims", 1.0)])


@pytest.mark.parametrize(
    "text",
    ["<lora:>", "<lora:a:b>", "<lora:a:nan>", "<lora:a:5>", "<lora:a:1:1>", "<lyco:a:1>", "<hypernet:a:1>",
     "(red)", "(red:1.2)", "(red:+1.2)", "(red:1.2.3)", "(a red: .5 )", "[red]", "[red:blue:0.5]", "[red:10]",
     "[red::3]", "[red|blue]", "[(a red:1) | (blue)]", "AND", "BREAK"],
)  # fmt: skip
@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_other_syntax_is_refused_as_it_stands(text: str, field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        split(f"a {text} star", field)
    received = "(blue)" if "(blue)" in text else text
    assert (refused.value.field, refused.value.received) == (field, received)
    assert refused.value.accepted


@pytest.mark.parametrize(
    ("prompt", "received"),
    [
        ("(a (red) circle:1.4)", "(red)"),
        ("(a red circle:1.4)", "(a red circle:1.4)"),
        ("a ((masterpiece))", "(masterpiece)"),
        ("[(a red:1.0)] circle", "[(a red:1.0)]"),
        ("a (red circle", "(red circle"),
        ("an [old (red:1) circle", "[old (red:1) circle"),
        ("a (red] circle) b)", "(red] circle)"),
        ("CATS AND DOGS", "AND"),
    ],
)
def test_nested_and_open_brackets_are_refused(prompt: str, received: str) -> None:
    with pytest.raises(InvalidField) as refused:
        split(prompt, "prompt")
    assert refused.value.received == received


@pytest.mark.parametrize(
    "text",
    [
        "at 10:30",
        "a < b",
        "a: b",
        "a | b",
        "a star :)",
        "red] or 2)",
        "a \\ b",
        "and break",
        "BRAND BREAKS",
        "",
    ],
)
def test_words_stay_as_they_are(text: str) -> None:
    assert split(text, "prompt") == (text, [])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (r"a \(red\) \[star\] \\", "a (red) [star] \\"),
        ("a (red: 1.0) star", "a red star"),
        ("an empty () and []", "an empty  and "),
    ],
)
def test_escapes_are_characters_and_weights_of_one_are_words(prompt: str, words: str) -> None:
    assert split(prompt, "prompt") == (words, [])


@given(st.text(st.characters(exclude_characters="<>")).filter(lambda text: not re.search("AND|BREAK", text)))
def test_whatever_is_escaped_is_read_as_it_is(text: str) -> None:
    assert split(re.sub(r"([()\[\]\\])", r"\\\1", text), "prompt") == (text, [])


def test_the_setting_emphasis_takes_weights_away_or_reads_brackets_as_characters() -> None:
    prompt = r"(a (red:1.3) [old] \(x\) circle:1.4), best"
    assert split(prompt, "prompt", Emphasis.IGNORE) == ("a red old (x) circle, best", [])
    assert split(prompt, "prompt", Emphasis.NONE) == (prompt, [])
    with pytest.raises(InvalidField):
        split(prompt, "prompt", Emphasis.NO_NORM)
    for emphasis in Emphasis:
        for text in ("[a:b:3]", "[a|b]", "a AND b"):
            with pytest.raises(InvalidField):
                split(text, "prompt", emphasis)


def test_a_lora_is_named_by_name_file_or_id_and_the_newest_is_meant() -> None:
    records = [
        record("c", "rims", state=LoraState.FAILED),
        record("b", "rims.safetensors"),
        record("a", "rims"),
        record("d", "rims", model="another"),
        record("e", None),
    ]
    for name, letter in (
        ("rims", "b"),
        ("rims.safetensors", "b"),
        (f"lora_{'a' * 32}", "a"),
        (f"lora_{'e' * 32}", "e"),
    ):
        assert named([LoraTag(name, 0.5)], records, CARD) == (AskedLora(id=f"lora_{letter * 32}", scale=0.5),)
    with pytest.raises(LoraNotFound) as missing:
        named([LoraTag("Rims", 1.0)], records, CARD)
    assert (missing.value.field, missing.value.received) == ("prompt", "Rims")
    assert missing.value.accepted == f"lora_{'e' * 32}, rims"


# Units of A1111's extension for ControlNets, and titles of models.


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


def test_defaults_of_clients_are_accepted() -> None:
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


SCRIPTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from([*ControlNetUnitForm.model_fields, *NEUTRAL, "args"]), inner)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["ControlNet", "controlnet", "other"]), SCRIPTS))
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
