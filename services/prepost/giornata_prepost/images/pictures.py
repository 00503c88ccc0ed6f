"""Pictures: their sizes and boxes, untrusted bytes to upright 8-bit pixels, and pixels to PNG, JPEG and WebP.

Decisions:

* Accepted are PNG, JPEG and WebP, recognised by content; every further decoder would be a further door.
* An animation is refused: editing one frame of it would drop the others silently.
* 16 bits become 8 by their high byte, which maps every value of an 8-bit picture stored in 16 bits onto
  itself.
* CMYK JPEG becomes RGB the plain way (Adobe's inversion undone); its ICC profile is not applied.
* The ICC profile of an RGB picture is neither applied nor lost: pixel values stay, and the output carries it.
* Other metadata is taken out before anything is decoded, and never decides over pixels: see
  :mod:`giornata.picture_files`, which also says which way up a picture is.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from math import isqrt
from typing import Any, Final, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from giornata.picture_files import MAX_ICC_BYTES, picture_parts
from giornata.wire.errors import (
    ImageUnreadable,
    InvalidField,
    SizeMismatch,
    TooManyPixels,
    UnsupportedImageFormat,
)
from giornata.wire.requests import EditParameters, OutputFormat

ASPECT_TOLERANCE: Final = 0.02
"""Two sizes have the same aspect ratio when the ratios differ by at most this fraction."""


class Size(NamedTuple):
    """Width and height in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    @classmethod
    def of(cls, pixels: npt.NDArray[np.generic]) -> Self:
        """The size of an array (height, width, ...)."""
        return cls(pixels.shape[1], pixels.shape[0])

    @property
    def pixels(self) -> int:
        """Number of pixels."""
        return self.width * self.height


class Box(NamedTuple):
    """A part of a picture, in pixels."""

    left: int
    top: int
    width: int
    height: int

    @property
    def size(self) -> Size:
        """Width and height."""
        return Size(self.width, self.height)

    @property
    def window(self) -> tuple[slice, slice]:
        """It indexes an array (height, width, ...)."""
        return slice(self.top, self.top + self.height), slice(self.left, self.left + self.width)


def same_aspect(one: Size, other: Size) -> bool:
    """Return whether the aspect ratios differ by at most :data:`ASPECT_TOLERANCE`; symmetric in its arguments."""
    a, b = one.width * other.height, other.width * one.height
    return max(a, b) <= (1 + ASPECT_TOLERANCE) * min(a, b)


def model_size(picture: Size, budget_pixels: int, multiple: int) -> Size:
    """Size of the picture that enters the autoencoder; `multiple` is the pixels of one token's side (16 for Flux).

    A larger picture is scaled down to `budget_pixels`, which is at least ``multiple ** 2``. Each side is then cut to a
    multiple. Nothing is scaled up, except that no side is below one multiple. The aspect ratio may change by less than
    one multiple a side; the painted picture is resized back by the same factors, so the output is not distorted.
    """
    scaled = of_area(picture, budget_pixels) if picture.pixels > budget_pixels else picture
    return _in_multiples(scaled, budget_pixels, multiple)


def generated_size(requested: tuple[int, int] | None, native: int, budget_pixels: int, multiple: int) -> Size:
    """Size of the pictures of a generation: the requested one, or the model's native square as far as it is allowed.

    Raises:
        TooManyPixels: the requested one has more than `budget_pixels`.
    """
    if requested is None:
        return model_size(Size(native, native), budget_pixels, multiple)
    size = Size(*requested)
    if size.pixels > budget_pixels:
        raise TooManyPixels(
            "The requested picture has more pixels than this server computes.",
            field="size",
            received=f"{size}, that is {size.pixels} pixels",
            accepted=f"at most {budget_pixels} pixels",
        )
    return size


def crop_box(marked: Box, picture: Size) -> Box:
    """The box that `padding_mask_crop` cuts out: the mask's with its padding, made square where there is room.

    The shorter side grows on both ends, and inward only where the picture ends; this is
    `VaeImageProcessor.get_crop_region` of diffusers for a square. Every checkpoint was trained on squares, and what a
    square adds around a long mask is context.
    """
    side = max(marked.size)
    left, width = _grown(marked.left, marked.width, side, picture.width)
    top, height = _grown(marked.top, marked.height, side, picture.height)
    return Box(left, top, width, height)


def crop_size(cut_out: Size, native: int, budget_pixels: int, multiple: int) -> Size:
    """Size at which the model computes what :func:`crop_box` cut out: up to `native` squared pixels, scaled up or down.

    A square box becomes the native square. Where the picture had no room for a square, the box's own shape is kept,
    within less than one multiple a side, and not padded to a square as diffusers does (`resize_mode="fill"`): smeared
    borders would be computed and thrown away, and the model would see them.
    """
    pixels = max(min(native**2, budget_pixels), multiple**2)
    return _in_multiples(of_area(cut_out, pixels), pixels, multiple)


def crops_alike(
    marked: Sequence[Box], picture: Size, native: int, budget_pixels: int, multiple: int
) -> tuple[tuple[Box, ...], Size]:
    """What :func:`crop_box` cuts out of each marked box, and the one size at which the model computes all of them.

    Where these boxes would have several sizes, since the picture has no room for some square, each marked box is grown
    to the picture's own shape instead, which always has room.
    """
    crops = tuple(crop_box(box, picture) for box in marked)
    sizes = {crop_size(crop.size, native, budget_pixels, multiple) for crop in crops}
    if len(sizes) == 1:
        return crops, sizes.pop()
    crops = tuple(_of_shape(box, picture) for box in marked)
    return crops, crop_size(picture, native, budget_pixels, multiple)


def _of_shape(marked: Box, picture: Size) -> Box:
    """The smallest box of the picture's shape around a marked one, inside the picture."""
    larger = max(marked.width * picture.height, marked.height * picture.width)
    left, width = _grown(marked.left, marked.width, -(-larger // picture.height), picture.width)
    top, height = _grown(marked.top, marked.height, -(-larger // picture.width), picture.height)
    return Box(left, top, width, height)


def _grown(start: int, length: int, wanted: int, limit: int) -> tuple[int, int]:
    """Start and length of a span of `wanted` pixels around a span, kept within 0..limit."""
    wanted = min(wanted, limit)
    return min(max(start - (wanted - length) // 2, 0), limit - wanted), wanted


def of_area(shape: Size, pixels: int) -> Size:
    """The size of a shape that has at most `pixels`: floor(width * sqrt(pixels / (width * height))), exactly."""
    width, height = shape
    return Size(isqrt(pixels * width // height), isqrt(pixels * height // width))


def _in_multiples(size: Size, budget_pixels: int, multiple: int) -> Size:
    """Each side cut to a multiple, but to no less than one."""
    width, height = (max(multiple, side // multiple * multiple) for side in size)
    if width * height > budget_pixels:  # a side was raised to one multiple
        longest = max(multiple, budget_pixels // multiple // multiple * multiple)
        width, height = min(width, longest), min(height, longest)
    return Size(width, height)


def output_size(picture: Size, requested: tuple[int, int] | None, max_pixels: int) -> Size:
    """Size of the answer: the picture's own, or the requested one where its aspect ratio is the picture's.

    Raises:
        SizeMismatch: another aspect ratio; names the nearest sizes that fit.
        TooManyPixels: more than `max_pixels`.
    """
    if requested is None:
        return picture
    size = Size(*requested)
    if not same_aspect(size, picture):
        raise SizeMismatch(
            f"The picture is {picture} and the output is to have the same aspect ratio.",
            field="size",
            received=size,
            accepted=f"auto, {' or '.join(_nearest(picture, size))}",
        )
    if size.pixels > max_pixels:
        raise TooManyPixels(
            "The requested output has more pixels than this server makes.",
            field="size",
            received=f"{size}, that is {size.pixels} pixels",
            accepted=f"at most {max_pixels} pixels",
        )
    return size


def _nearest(picture: Size, requested: Size) -> list[str]:
    by_width = Size(requested.width, max(1, round(requested.width * picture.height / picture.width)))
    by_height = Size(max(1, round(requested.height * picture.width / picture.height)), requested.height)
    return [str(size) for size in (by_width, by_height) if same_aspect(size, picture)] or [str(picture)]


# Untrusted image bytes to upright 8-bit pixels, and pixels to files.

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""(height, width, 3 or 4) uint8: RGB, or RGB and straight alpha."""

PNG_LEVEL: Final = 3
"""zlib level: 2.5 times as fast as the usual 6 on photographs, for about 12 % more bytes."""
MAX_SIDE: Final = {OutputFormat.PNG: 2**31 - 1, OutputFormat.JPEG: 65_500, OutputFormat.WEBP: 16_383}
ACCEPTED: Final = "PNG, JPEG, WebP"

_OTHERS: Final = (
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"%PDF", "PDF"),
    (b"<", "SVG or HTML"),
)

_DECODER_ERRORS: Final = (
    OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError, MemoryError,
    struct.error, zlib.error
)  # fmt: skip
"""What Pillow's decoders raise on damaged files."""


@dataclass(frozen=True)
class DecodedPicture:
    """A decoded picture, upright."""

    pixels: Pixels
    icc_profile: bytes | None = None
    """What the numbers mean, where the file said so and they are RGB."""


def decode(data: bytes, max_pixels: int, field: str = "image") -> DecodedPicture:
    """Decode an untrusted file, which the request has in `field`.

    Its header says that it has at most `max_pixels`, before anything is decoded. (Pillow has a limit of its own, 179
    million.)

    Raises:
        UnsupportedImageFormat: not PNG, JPEG or WebP by content, or an animation.
        TooManyPixels: the header says more than `max_pixels`.
        ImageUnreadable: truncated or damaged.
    """
    form = _sniff(data, field)
    try:
        # Pillow warns of large pictures and odd metadata; both are decided here.
        file, orientation, profile = picture_parts(data)
        with warnings.catch_warnings(action="ignore"), Image.open(BytesIO(file), formats=(form,)) as image:
            _check_header(image, max_pixels, field)
            image.load()
            pixels = _upright(_to_pixels(image, file), orientation)
            return DecodedPicture(pixels, _rgb_profile(profile or image.info.get("icc_profile")))
    except Image.DecompressionBombError as error:
        raise TooManyPixels(field=field, received=error) from error
    except _DECODER_ERRORS as error:
        raise ImageUnreadable(
            f"The {field} looks like {form} but cannot be decoded; it may be truncated or damaged.",
            field=field,
            received=f"{len(data)} bytes ({type(error).__name__}: {error})",
            accepted="a complete " + ACCEPTED + " file",
        ) from error


def encode_as_asked(picture: DecodedPicture, parameters: EditParameters) -> bytes:
    """A finished picture as a request wants its file; raises as :func:`encode`."""
    if parameters.background == "opaque":
        picture = DecodedPicture(flatten(picture.pixels), picture.icc_profile)
    return encode(picture, parameters.output_format, parameters.output_compression)


def encode(picture: DecodedPicture, form: OutputFormat, compression: int | None = None) -> bytes:
    """Encode a picture and its ICC profile.

    PNG is lossless. JPEG has no alpha: it is flattened over white; from quality 90 on colour is not
    subsampled. WebP is lossless at 100. `compression` is OpenAI's `output_compression`, the quality of JPEG and WebP,
    default 95.

    Raises:
        InvalidField: `compression` with PNG, or out of range.
        SizeMismatch: a side is longer than the format can hold.
    """
    if compression is not None and (form is OutputFormat.PNG or not 0 <= compression <= 100):
        raise InvalidField(
            field="output_compression", received=compression, accepted="0 to 100, with jpeg or webp"
        )
    size = Size.of(picture.pixels)
    if max(size) > MAX_SIDE[form]:
        raise SizeMismatch(
            f"{form} cannot hold a picture of this size.",
            field="output_format",
            received=size,
            accepted=f"sides up to {MAX_SIDE[form]} pixels, or png",
        )
    quality = 95 if compression is None else compression
    options: dict[OutputFormat, dict[str, Any]] = {
        OutputFormat.PNG: {"compress_level": PNG_LEVEL},
        OutputFormat.JPEG: {"quality": quality, "subsampling": 0 if quality >= 90 else 2},
        OutputFormat.WEBP: {"quality": quality, "lossless": quality == 100, "exact": True, "method": 2},
    }
    if picture.icc_profile is not None:
        options[form]["icc_profile"] = picture.icc_profile
    pixels = flatten(picture.pixels) if form is OutputFormat.JPEG else picture.pixels
    target = BytesIO()
    Image.fromarray(pixels).save(target, form.value, **options[form])
    return target.getvalue()


def flatten(pixels: Pixels) -> Pixels:
    """RGB as seen on a white page: (height, width, 3) uint8, exact where the alpha is 255."""
    if pixels.shape[2] == 3:
        return pixels
    alpha = pixels[..., 3:].astype(np.uint16)
    if alpha.min(initial=255) == 255:
        return np.ascontiguousarray(pixels[..., :3])
    return ((pixels[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)


def _sniff(data: bytes, field: str) -> str:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    name = next((name for magic, name in _OTHERS if data.startswith(magic)), None)
    if data[4:8] == b"ftyp":
        name = "AVIF" if data[8:11] == b"avi" else "HEIC or another ISO media file"
    raise UnsupportedImageFormat(
        f"The {field} is not in an accepted format.",
        field=field,
        received=name or (f"{len(data)} bytes of no known format" if data else "an empty file"),
        accepted=ACCEPTED,
    )


def _check_header(image: Image.Image, max_pixels: int, field: str) -> None:
    size = Size(image.width, image.height)
    if size.pixels > max_pixels:
        raise TooManyPixels(
            f"The {field} has more pixels than this server accepts.",
            field=field,
            received=f"{size}, that is {size.pixels} pixels",
            accepted=f"at most {max_pixels} pixels",
        )
    if getattr(image, "is_animated", False):
        raise UnsupportedImageFormat(
            f"The {field} is an animation.",
            field=field,
            received=f"{image.format} with {getattr(image, 'n_frames', 'several')} frames",
            accepted="a still picture",
        )


def _to_pixels(image: Image.Image, data: bytes) -> Pixels:
    """Any mode that the three decoders produce → RGB or RGBA."""
    if image.mode == "P":
        clear = "transparency" in image.info or (image.palette is not None and image.palette.mode == "RGBA")
        return np.array(image.convert("RGBA" if clear else "RGB"))
    if image.mode in ("LA", "PA", "La", "RGBa"):
        return np.array(image.convert("RGBA"))
    if image.mode in ("RGB", "RGBA"):
        pixels = np.array(image)
        return _with_key(pixels, pixels, image, data)
    if image.mode.startswith("I"):
        deep = np.array(image).astype(np.uint16)[..., None]
        return _with_key((deep >> 8).astype(np.uint8).repeat(3, axis=2), deep, image, data)
    if image.mode in ("1", "L"):
        grey = np.array(image.convert("L"))[..., None]
        return _with_key(grey.repeat(3, axis=2), grey, image, data)
    return np.array(image.convert("RGB"))  # CMYK, YCbCr


def _with_key(pixels: Pixels, stored: npt.NDArray[np.generic], image: Image.Image, data: bytes) -> Pixels:
    """Turn a PNG's transparent colour (tRNS of a picture without palette) into an alpha channel.

    Pillow leaves the colour in the file's own depth while it widens or narrows the samples.
    """
    key = image.info.get("transparency")
    if key is None or image.format != "PNG" or pixels.shape[2] == 4:
        return pixels
    depth = data[24]
    colour = np.atleast_1d(np.asarray(key, dtype=np.int64))
    if depth < 8 and image.mode != "1":
        colour = colour * 255 // (2**depth - 1)
    elif depth == 16 and stored.dtype == np.uint8:
        colour = colour >> 8
    clear = (stored == colour).all(axis=2)
    return np.dstack([pixels, np.where(clear, 0, 255).astype(np.uint8)])


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    """Pixels turned by EXIF's number: from 5 on sides change places, then columns, rows or both are turned round."""
    turned = pixels.swapaxes(0, 1) if orientation > 4 else pixels
    rows, columns = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
    return np.ascontiguousarray(turned[:: -1 if rows else 1, :: -1 if columns else 1])


def _rgb_profile(profile: object) -> bytes | None:
    if isinstance(profile, bytes) and 128 < len(profile) <= MAX_ICC_BYTES and profile[16:20] == b"RGB ":
        return profile
    return None
