"""The form of a mask from words as a typed value."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from giornata.wire.mask_words import MAX_REGIONS, MaskFromWords, MaskWords
from giornata.wire.requests import ModelName, asked
from giornata_gateway.intake.rules.forms import Upload, check_alone, once_each, prefers_image


def _of_mask(name: str) -> str | None:
    """The description of a field that edits have too."""
    told = MaskFromWords.model_fields[name].description or ""
    return told.replace("`mask_prompt`", "`prompt`")


class MaskFormat(StrEnum):
    """How the masks of an answer travel."""

    B64_JSON = "b64_json"
    """Inside the JSON answer, with every region's own."""
    IMAGE = "image"
    """The answer's body is the mask of all regions together."""


class MaskForm(BaseModel):
    """Fields of ``POST /v1/masks``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: MaskWords = Field(description='What the mask shows, in words: "the left shoe".')
    mask_threshold: float | None = Field(None, gt=0, le=1, description=_of_mask("mask_threshold"))
    max_regions: int | None = Field(None, ge=1, le=MAX_REGIONS, description=_of_mask("max_regions"))
    model: ModelName | None = Field(
        None,
        description="Name of a model beside which masks are made; default: any. Masks do not depend on what paints.",
    )
    response_format: MaskFormat = Field(
        MaskFormat.B64_JSON,
        description="`image` is the default where the Accept header prefers an image type.",
    )

    def asked(self) -> MaskFromWords:
        """The same as fields of an edit."""
        return MaskFromWords(
            mask_prompt=self.prompt, mask_threshold=self.mask_threshold, max_regions=self.max_regions
        )


def read_mask_form(upload: Upload, accept: str = "") -> MaskForm:
    """The form of a mask from words; raises as :func:`asked`. `accept` is the Accept header."""
    check_alone(upload, "A mask is made of one picture.")
    values: dict[str, object] = dict(once_each(upload.fields))
    if prefers_image(accept):
        values.setdefault("response_format", MaskFormat.IMAGE)
    return asked(MaskForm, values)
