"""The form of a mask from words as a typed value."""

from __future__ import annotations

from collections.abc import Container
from enum import StrEnum

from pydantic import ConfigDict, Field

from giornata.wire.errors import NotSupported
from giornata.wire.masks import MaskParameters
from giornata.wire.requests import asked
from giornata_gateway.intake.rules.forms import RequestBody, check_alone, once_each, prefers_image


class MaskFormat(StrEnum):
    """How the masks of an answer travel."""

    B64_JSON = "b64_json"
    """Inside the JSON answer, with every region's own."""
    IMAGE = "image"
    """The answer's body is the mask of all regions together."""


class MaskForm(MaskParameters):
    """Fields of ``POST /v1/masks``."""

    model_config = ConfigDict(extra="forbid")

    response_format: MaskFormat = Field(
        MaskFormat.B64_JSON,
        description="`image` is the default where the Accept header prefers an image type.",
    )


def read_mask_form(upload: RequestBody, accept: str = "") -> MaskForm:
    """The form of a mask from words; raises as :func:`asked`. `accept` is the Accept header."""
    check_alone(upload, "A mask is made of one picture.")
    values: dict[str, object] = dict(once_each(upload.fields))
    if prefers_image(accept):
        values.setdefault("response_format", MaskFormat.IMAGE)
    return asked(MaskForm, values)


def check_no_key(headers: Container[str], header: str) -> None:
    """Raise NotSupported where a request for a mask has the `header` of an idempotency key."""
    if header in headers:
        raise NotSupported(
            "A mask is no job that a key could lead to.", field=header, accepted="leave it out"
        )
