"""What a request says. Pure."""

from __future__ import annotations

import io
from typing import Annotated, Final, Literal

from PIL import Image, ImageOps
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from giornata.wire.errors import ImageUnreadable, InvalidField, MaskEmpty, MaskSizeMismatch, TooManyPixels
from giornata.wire.requests import MAX_IMAGES, MAX_SEED, MAX_STEPS, OutputSize

MULTIPLE: Final = 16
"""Sides of computed pictures: Flux's token."""
MAX_PIXELS: Final = 4096 * 4096
OPAQUE: Final = 128
"""Where a mask has an alpha channel, its pixels below are repainted."""


class BaselineForm(BaseModel):
    """Fields of ``POST /v1/images/edits`` besides the files: OpenAI's, and diffusers' own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: Annotated[str, StringConstraints(min_length=1, max_length=4000)]
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
        ImageUnreadable, TooManyPixels: it cannot be.
    """
    return _opened(file, "image").convert("RGB")


def read_mask(file: bytes | None, image: bytes) -> Image.Image:
    """What is repainted, white, of mode L: where the mask is transparent, or white where it is opaque all over.

    Without a mask's `file` the transparency of the file `image` counts.

    Raises:
        ImageUnreadable, TooManyPixels, MaskEmpty, MaskSizeMismatch: there is no such mask.
    """
    picture = _opened(image, "image")
    source = picture if file is None else _opened(file, "mask")
    if source.size != picture.size:
        received, accepted = ("x".join(map(str, one.size)) for one in (source, picture))
        raise MaskSizeMismatch(field="mask", received=received, accepted=accepted)
    rgba = source.convert("RGBA")
    transparent = rgba.getchannel("A").point(lambda alpha: 255 if alpha < OPAQUE else 0)
    if transparent.getbbox() is None and file is not None:
        transparent = rgba.convert("L")
    if transparent.getbbox() is None:
        raise MaskEmpty(field="mask", accepted="a mask with transparent or white pixels")
    return transparent


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


def _opened(file: bytes, field: str) -> Image.Image:
    try:
        opened: Image.Image = Image.open(io.BytesIO(file))
        if opened.width * opened.height > MAX_PIXELS:
            raise TooManyPixels(
                field=field, received=f"{opened.width}x{opened.height}", accepted=f"{MAX_PIXELS} pixels"
            )
        upright = ImageOps.exif_transpose(opened)
        upright.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageUnreadable(
            f"The {field} cannot be decoded: {error}.", field=field, accepted="PNG, JPEG or WebP"
        ) from error
    return upright
