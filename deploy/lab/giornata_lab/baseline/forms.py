"""What a request says. Pure."""

from __future__ import annotations

from typing import Final, Literal

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from giornata.wire.errors import InvalidField
from giornata.wire.requests import MAX_IMAGES, MAX_SEED, MAX_STEPS, MaskMode, OutputSize, Prompt
from giornata_prepost.images.masks import edited_region
from giornata_prepost.images.pictures import decode

MULTIPLE: Final = 16
"""Sides of computed pictures: Flux's token."""
MAX_PIXELS: Final = 4096 * 4096


class BaselineForm(BaseModel):
    """Fields of ``POST /v1/images/edits`` besides the files: OpenAI's, and diffusers' own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: Prompt
    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_IMAGES)
    size: OutputSize = "auto"
    response_format: Literal["b64_json"] = "b64_json"
    num_inference_steps: int | None = Field(None, ge=1, le=MAX_STEPS)
    guidance_scale: float | None = Field(None, ge=0, le=100)
    strength: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)


def read_image(file: bytes) -> Image.Image:
    """The picture, upright and RGB, as diffusers loads it.

    Raises:
        BadRequest: as :func:`giornata_prepost.images.pictures.decode`.
    """
    return Image.fromarray(decode(file, MAX_PIXELS).pixels[..., :3])


def read_mask(file: bytes | None, image: bytes) -> Image.Image:
    """What is repainted, white, of mode L and the size of the file `image`: as the system has it by default.

    Raises:
        BadRequest: as :func:`giornata_prepost.images.masks.edited_region`.
    """
    marks = None if file is None else decode(file, MAX_PIXELS, "mask").pixels
    return Image.fromarray(edited_region(decode(image, MAX_PIXELS).pixels, marks, MaskMode.AUTO)).convert("L")


def size_of(form: BaselineForm, image: Image.Image) -> tuple[int, int]:
    """(width, height) that the pipeline computes: as asked for, or the image's, down to multiples of a token.

    Raises:
        InvalidField: as asked for, it is too small or too large.
    """
    width, height = image.size if form.size == "auto" else map(int, form.size.split("x"))
    if min(width, height) < MULTIPLE or width * height > MAX_PIXELS:
        raise InvalidField(
            field="size",
            received=f"{width}x{height}",
            accepted=f"sides from {MULTIPLE} pixels, {MAX_PIXELS} pixels at most",
        )
    return width // MULTIPLE * MULTIPLE, height // MULTIPLE * MULTIPLE
