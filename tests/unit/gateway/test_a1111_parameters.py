"""From A1111's fields to parameters, by model."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.families import Family
from giornata.wire.errors import BadRequest, InvalidField
from giornata.wire.models import DISCRETE_TIME, ModelCard, Sampler
from giornata.wire.requests import EditParameters, MaskMode, Reuse
from giornata.wire.resolution import resolve
from giornata_gateway.rules import a1111_forms as forms
from giornata_gateway.rules.a1111_forms import ImageToImage, Settings, TextToImage, read
from giornata_gateway.rules.a1111_parameters import (
    NAMES,
    RequestedControlNets,
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
