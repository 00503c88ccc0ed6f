"""What requests say of a mask from words. Pure."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo, field_validator

from giornata.wire.values import RecordModel, not_blank

MAX_WORDS: Final = 200
"""Characters of the words that name what a mask shows."""
MAX_REGIONS: Final = 16
"""Most regions of one mask; also what is taken where a request names no number."""
EACH_REGIONS: Final = 4
"""Regions that are edited one by one, where a request names no number: each costs as much as a picture."""
EACH_PADDING: Final = 32
"""Pixels around each of them, where a request names no number; what A1111 and ADetailer take."""
MASK_PROMPT: Final = "mask_prompt"
"""Name of the field."""


MaskWords = Annotated[str, StringConstraints(min_length=1, max_length=MAX_WORDS), AfterValidator(not_blank)]


class SegmentationFields(RecordModel):
    """Fields of an edit that ask for its mask."""

    mask_prompt: MaskWords | None = Field(
        None,
        description='What to repaint, in words, instead of `mask`: "the left shoe". Every region that the words name '
        "is; `mask_mode=black` repaints everything else.",
    )
    mask_threshold: float | None = Field(
        None,
        gt=0,
        le=1,
        description="How sure the mask model must be of a region of `mask_prompt`; default: the model's own.",
    )
    max_regions: int | None = Field(
        None,
        ge=1,
        le=MAX_REGIONS,
        description=f"How many regions of `mask_prompt` are taken at most, the surest ones; default: {MAX_REGIONS}.",
    )

    auto_edit: bool = Field(
        default=False,
        description="Edit each region of `mask_prompt` by itself, at the model's own resolution around it, and paste "
        f"all into one picture. `padding_mask_crop` is {EACH_PADDING} then by default, `max_regions` {EACH_REGIONS}.",
    )

    @field_validator("mask_threshold", "max_regions")
    @classmethod
    def _is_of_words(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get(MASK_PROMPT, "") is None:
            raise ValueError("needs mask_prompt")
        return value

    @field_validator("auto_edit")
    @classmethod
    def _edits_regions(cls, each: bool, info: ValidationInfo) -> bool:  # noqa: FBT001 - the field's value
        if not each:
            return each
        if info.data.get(MASK_PROMPT, "") is None:
            raise ValueError("needs mask_prompt")
        plain = {"n": 1, "partial_images": 0, "controlnets": ()}
        for name, value in plain.items():
            if info.data.get(name, value) != value:
                raise ValueError(f"makes one picture of several crops, and takes no {name}")
        return each
