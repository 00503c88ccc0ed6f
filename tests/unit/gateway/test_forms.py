from __future__ import annotations

import pytest

from giornata.wire.errors import GiornataError, InvalidField, UnknownField
from giornata.wire.requests import MaskMode
from giornata_gateway.nats_door import REPLY_MARGIN_BYTES, inline_pictures
from giornata_gateway.rules.forms import EditForm, JobForm, ResponseFormat, prefers_image, read_form


def test_texts_become_values() -> None:
    fields = {
        "prompt": "x",
        "n": "3",
        "seed": "9",
        "mask_blur": "0.5",
        "stream": "true",
        "mask_mode": "black",
    }
    form = read_form(EditForm, fields.items())
    parameters = form.parameters()
    assert (form.stream, parameters.n, parameters.seed, parameters.mask_blur) == (True, 3, 9, 0.5)
    assert parameters.mask_mode is MaskMode.BLACK
    assert set(parameters.model_dump()) == set(type(parameters).model_fields)
    assert not hasattr(parameters, "stream")


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ([("prompt", "x"), ("prompt", "y")], "invalid_field", "prompt"),
        ([("prompt", "x"), ("input_fidelity", "medium")], "invalid_field", "input_fidelity"),
        ([("prompt", "x"), ("partial_images", "17"), ("stream", "true")], "invalid_field", "partial_images"),
        ([("prompt", "x"), ("partial_images", "2")], "invalid_field", "partial_images"),
        ([("prompt", "x"), ("partial_images", "1"), ("stream", "false")], "invalid_field", "partial_images"),
        ([("prompt", "x"), ("padding_mask_crop", "-1")], "invalid_field", "padding_mask_crop"),
        ([("prompt", "x"), ("padding_mask_crop", "4097")], "invalid_field", "padding_mask_crop"),
        ([("prompt", "x"), ("n", "1.5")], "invalid_field", "n"),
        ([("prompt", "x"), ("seed", "nan")], "invalid_field", "seed"),
        ([("prompt", "x"), ("stream", "perhaps")], "invalid_field", "stream"),
        ([("prompt", "x"), ("quality", "4k")], "invalid_field", "quality"),
        ([], "invalid_field", "prompt"),
    ],
)
def test_refusals_name_the_field(fields: list[tuple[str, str]], code: str, field: str) -> None:
    with pytest.raises(GiornataError) as raised:
        read_form(EditForm, fields)
    assert (raised.value.code, raised.value.field) == (code, field)


def test_fields_without_effect_are_told() -> None:
    fields = {
        "prompt": "x",
        "output_compression": "90",
        "style": "vivid",
        "moderation": "",
        "user": "u",
        "size": "",
    }
    form = read_form(EditForm, fields.items())
    assert form.ignored == ("output_compression", "style")
    assert (form.user, form.size, form.output_compression) == ("u", "auto", None)
    kept = read_form(EditForm, [*fields.items(), ("output_format", "webp")])
    assert (kept.ignored, kept.output_compression) == (("style",), 90)
    assert read_form(EditForm, [("prompt", "x"), ("negative_prompt", "")]).negative_prompt == ""
    with pytest.raises(UnknownField, match="mood"):
        read_form(EditForm, [("prompt", "x"), ("mood", "")])


def test_accept_chooses_the_picture_itself_unless_the_form_says_otherwise() -> None:
    assert read_form(EditForm, [("prompt", "x")], "image/*").response_format is ResponseFormat.IMAGE
    fields = [("prompt", "x"), ("response_format", "url")]
    assert read_form(EditForm, fields, "image/png, */*").response_format is ResponseFormat.URL
    assert not prefers_image("text/html,image/avif,*/*")
    assert not prefers_image("*/*")


def test_jobs_take_no_field_of_an_open_connection() -> None:
    with pytest.raises(InvalidField, match="leave stream out"):
        read_form(JobForm, [("prompt", "x"), ("stream", "false")])


def test_pictures_are_inline_while_there_is_room() -> None:
    room = REPLY_MARGIN_BYTES + 100
    assert inline_pictures({0: 60, 1: 60, 2: 40}, room) == {0, 2}
    assert inline_pictures({0: 101}, room) == set()


def test_partial_images_of_a_job_need_no_stream() -> None:
    form = read_form(JobForm, [("prompt", "x"), ("partial_images", "3")])
    assert form.parameters().partial_images == 3  # its events can be followed
