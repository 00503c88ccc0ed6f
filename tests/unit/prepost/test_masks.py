"""Sizes and masks: what is marked, how far it grows and fades, and which model pixels and tokens that touches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image
from scipy import ndimage

from giornata.wire.errors import (
    GiornataError,
    MaskEmpty,
    MaskRejected,
    MaskSizeMismatch,
    SizeMismatch,
    TooManyPixels,
)
from giornata.wire.requests import MaskMode
from giornata_prepost.images.masks import (
    EDGE_PX,
    LEVELS,
    MIN_ALPHA,
    REACH_PER_SIGMA,
    Alpha,
    Region,
    bounds,
    compute_set,
    edited_region,
    effective_alpha,
    model_mask,
    nearest,
    pack_alpha,
    pool_cells,
    unpack_alpha,
)
from giornata_prepost.images.pictures import (
    ASPECT_TOLERANCE,
    Box,
    Pixels,
    Size,
    crop_box,
    crop_size,
    crops_alike,
    model_size,
    output_size,
    same_aspect,
)

SIDES = st.integers(1, 20_000)
SIZES = st.builds(Size, SIDES, SIDES)
MEGAPIXEL = 1024 * 1024


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        (Size(1024, 1024), Size(1024, 1024)),
        (Size(2048, 2048), Size(1024, 1024)),
        (Size(3000, 3000), Size(1024, 1024)),
        (Size(1023, 700), Size(1008, 688)),
        (Size(512, 512), Size(512, 512)),
        (Size(4000, 3000), Size(1168, 880)),
        (Size(7, 5), Size(16, 16)),
        (Size(1, 20_000), Size(16, 20_000)),
        (Size(1, 200_000), Size(16, 65_536)),
    ],
    ids=str,
)
def test_model_size(picture: Size, expected: Size) -> None:
    assert model_size(picture, MEGAPIXEL, 16) == expected


@given(picture=SIZES, budget=st.integers(32 * 32, 2**23), multiple=st.sampled_from([8, 16, 32]))
def test_model_size_keeps_its_promises(picture: Size, budget: int, multiple: int) -> None:
    size = model_size(picture, budget, multiple)
    assert size.width % multiple == size.height % multiple == 0
    assert multiple <= size.width <= max(multiple, picture.width)
    assert multiple <= size.height <= max(multiple, picture.height)
    assert size.pixels <= max(budget, multiple**2)


def test_output_size_is_the_pictures_own_by_default() -> None:
    assert output_size(Size(321, 123), None, 1) == (321, 123)


@pytest.mark.parametrize(
    "requested", [Size(500, 375), Size(4000, 3000), Size(40, 30), Size(404, 300), Size(400, 306)], ids=str
)
def test_output_size_of_the_same_aspect(requested: Size) -> None:
    assert output_size(Size(400, 300), requested, 4000 * 3000) == requested


@pytest.mark.parametrize(
    "requested", [Size(1024, 1024), Size(300, 400), Size(410, 300), Size(400, 308)], ids=str
)
def test_output_size_of_another_aspect_is_refused_with_suggestions(requested: Size) -> None:
    with pytest.raises(SizeMismatch) as caught:
        output_size(Size(400, 300), requested, MEGAPIXEL)
    assert caught.value.accepted is not None
    assert caught.value.accepted.startswith("auto, ")
    for suggestion in caught.value.accepted.removeprefix("auto, ").split(" or "):
        width, height = map(int, suggestion.split("x"))
        assert output_size(Size(400, 300), Size(width, height), 2 * MEGAPIXEL) == (width, height)


def test_output_with_too_many_pixels_is_refused() -> None:
    with pytest.raises(TooManyPixels) as caught:
        output_size(Size(100, 100), Size(1000, 1000), 999_999)
    assert caught.value.field == "size"


@given(one=SIZES, other=SIZES)
def test_same_aspect_is_symmetric_and_within_tolerance(one: Size, other: Size) -> None:
    verdict = same_aspect(one, other)
    assert verdict == same_aspect(other, one)
    ratio = (one.width / one.height) / (other.width / other.height)
    assert verdict == (max(ratio, 1 / ratio) <= 1 + ASPECT_TOLERANCE) or math.isclose(
        max(ratio, 1 / ratio), 1.02
    )


@st.composite
def marked_pictures(draw: st.DrawFn) -> tuple[Size, Box]:
    """A picture and a box in it."""
    picture = Size(draw(st.integers(1, 300)), draw(st.integers(1, 300)))
    left, top = draw(st.integers(0, picture.width - 1)), draw(st.integers(0, picture.height - 1))
    width, height = (draw(st.integers(1, limit)) for limit in (picture.width - left, picture.height - top))
    return picture, Box(left, top, width, height)


@given(marked=marked_pictures(), padding=st.integers(0, 400))
def test_the_crop_is_diffusers_own_for_a_square(marked: tuple[Size, Box], padding: int) -> None:
    picture, box = marked
    mask = np.zeros((picture.height, picture.width), np.uint8)
    mask[box.window] = 255
    left, top, right, bottom = VaeImageProcessor.get_crop_region(Image.fromarray(mask), 512, 512, pad=padding)
    expected = (left, top, right - left, bottom - top)
    assert crop_box(bounds(mask > 0, padding), picture) == expected


@pytest.mark.parametrize(
    ("cut_out", "native", "budget", "expected"),
    [
        (Size(100, 100), 1024, MEGAPIXEL, Size(1024, 1024)),
        (Size(3000, 3000), 1024, MEGAPIXEL, Size(1024, 1024)),
        (Size(100, 100), 256, MEGAPIXEL, Size(256, 256)),
        (Size(100, 100), 1024, 512 * 512, Size(512, 512)),
        (Size(100, 100), 500, MEGAPIXEL, Size(496, 496)),
        (Size(400, 200), 1024, MEGAPIXEL, Size(1440, 720)),
        (Size(1, 1), 8, MEGAPIXEL, Size(16, 16)),
        (Size(1, 500), 64, MEGAPIXEL, Size(16, 256)),
    ],
    ids=str,
)
def test_crop_size(cut_out: Size, native: int, budget: int, expected: Size) -> None:
    assert crop_size(cut_out, native, budget, 16) == expected


@given(
    cut_out=st.builds(Size, st.integers(1, 4000), st.integers(1, 4000)),
    native=st.integers(1, 2048),
    budget=st.integers(1024, 1 << 22),
)
def test_crop_size_keeps_its_promises(cut_out: Size, native: int, budget: int) -> None:
    size = crop_size(cut_out, native, budget, 16)
    assert size.width % 16 == size.height % 16 == 0
    assert min(size) >= 16
    area = max(min(native**2, budget), 256)
    assert size.pixels <= area
    scale = math.sqrt(area / cut_out.pixels)
    for side, original in zip(size, cut_out, strict=True):
        if min(size) > 16:
            assert original * scale - 17 < side <= original * scale + 1e-6


@given(st.lists(marked_pictures(), min_size=1, max_size=4))
def test_crops_of_several_masks_are_computed_at_one_size(marked: list[tuple[Size, Box]]) -> None:
    picture = marked[0][0]
    boxes = [
        box
        for _, box in marked
        if box.left + box.width <= picture.width and box.top + box.height <= picture.height
    ]
    crops, size = crops_alike(boxes, picture, 64, MEGAPIXEL, 16)
    assert len(crops) == len(boxes)
    for crop, box in zip(crops, boxes, strict=True):
        assert 0 <= crop.left <= box.left
        assert 0 <= crop.top <= box.top
        assert box.left + box.width <= crop.left + crop.width <= picture.width
        assert box.top + box.height <= crop.top + crop.height <= picture.height
    if len(boxes) == 1:
        assert crops == (crop_box(boxes[0], picture),)
        assert size == crop_size(crops[0].size, 64, MEGAPIXEL, 16)
    elif any(
        crop_size(crop.size, 64, MEGAPIXEL, 16) != size for crop in (crop_box(box, picture) for box in boxes)
    ):
        for crop in crops:  # the picture's shape, to the pixel
            assert (
                abs(crop.width * picture.height - crop.height * picture.width)
                < picture.width + picture.height
            )


# Masks: what is marked, how far it grows and fades, and which model pixels and tokens that touches.


OPAQUE = np.full((6, 8, 3), 90, np.uint8)
BOX = np.zeros((6, 8), np.bool_)
BOX[1:4, 2:7] = True

REGIONS = arrays.arrays(np.bool_, st.tuples(st.integers(1, 40), st.integers(1, 40)))


def painted(box: Region, inside: tuple[int, ...], outside: tuple[int, ...]) -> Pixels:
    return np.where(box[..., None], np.array(inside), np.array(outside)).astype(np.uint8)


CLEAR_BOX = painted(BOX, (9, 9, 9, 0), (9, 9, 9, 255))
WHITE_BOX = painted(BOX, (255, 255, 255), (0, 0, 0))
BLACK_BOX = painted(BOX, (0, 0, 0), (255, 255, 255))
WHITE_BOX_RGBA = painted(BOX, (255, 255, 255, 255), (0, 0, 0, 255))
WHITE_BOX_TRANSLUCENT = painted(BOX, (255, 255, 255, 254), (0, 0, 0, 200))
WHITE_ON_CLEAR = painted(BOX, (255, 255, 255, 255), (255, 255, 255, 0))
BLACK_ON_CLEAR = painted(BOX, (0, 0, 0, 255), (0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mask", "mode", "expected"),
    [
        (CLEAR_BOX, MaskMode.AUTO, BOX),
        (CLEAR_BOX, MaskMode.ALPHA, BOX),
        (WHITE_BOX, MaskMode.AUTO, BOX),
        (WHITE_BOX, MaskMode.WHITE, BOX),
        (WHITE_BOX, MaskMode.BLACK, ~BOX),
        (BLACK_BOX, MaskMode.BLACK, BOX),
        (WHITE_BOX_RGBA, MaskMode.AUTO, BOX),
        (WHITE_BOX_TRANSLUCENT, MaskMode.AUTO, BOX),
        (WHITE_ON_CLEAR, MaskMode.AUTO, ~BOX),
        (WHITE_ON_CLEAR, MaskMode.WHITE, BOX),
        (BLACK_ON_CLEAR, MaskMode.BLACK, BOX),
    ],
)
def test_marked(mask: Pixels, mode: MaskMode, expected: Region) -> None:
    np.testing.assert_array_equal(edited_region(OPAQUE, mask, mode), expected)


@pytest.mark.parametrize("mode", MaskMode)
def test_the_threshold_is_128(mode: MaskMode) -> None:
    levels = np.array([[0, 127, 128, 255]], np.uint8)
    grey, rgba = np.dstack([levels] * 3), np.dstack([np.zeros((1, 4, 3), np.uint8), levels])
    mask = rgba if mode is MaskMode.ALPHA else grey
    region = edited_region(np.zeros((1, 4, 3), np.uint8), mask, mode)
    white = [False, False, True, True]
    expected = [not marked for marked in white] if mode in (MaskMode.ALPHA, MaskMode.BLACK) else white
    assert region.tolist() == [expected]


def test_luma_weighs_colours() -> None:
    colours = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 0]]], np.uint8)
    assert edited_region(colours, colours, MaskMode.WHITE).tolist() == [[False, True, False, True]]


@pytest.mark.parametrize("mode", [MaskMode.AUTO, MaskMode.ALPHA])
def test_without_a_mask_the_images_transparency_is_it(mode: MaskMode) -> None:
    np.testing.assert_array_equal(edited_region(CLEAR_BOX, None, mode), BOX)


def test_without_a_mask_an_opaque_image_is_edited_as_a_whole() -> None:
    assert edited_region(OPAQUE, None, MaskMode.AUTO).all()
    assert edited_region(WHITE_BOX_RGBA, None, MaskMode.AUTO).all()
    assert edited_region(np.full((4, 4, 4), 200, np.uint8), None, MaskMode.AUTO).all()


@pytest.mark.parametrize(
    ("image", "mask", "mode", "kind"),
    [
        (OPAQUE, None, MaskMode.ALPHA, MaskRejected),
        (OPAQUE, None, MaskMode.WHITE, MaskRejected),
        (CLEAR_BOX, None, MaskMode.BLACK, MaskRejected),
        (OPAQUE, WHITE_BOX, MaskMode.ALPHA, MaskRejected),
        (OPAQUE, np.zeros_like(OPAQUE), MaskMode.AUTO, MaskEmpty),
        (OPAQUE, np.zeros_like(OPAQUE), MaskMode.WHITE, MaskEmpty),
        (OPAQUE, np.full_like(OPAQUE, 255), MaskMode.BLACK, MaskEmpty),
        (OPAQUE, WHITE_BOX_RGBA, MaskMode.ALPHA, MaskEmpty),
        (np.full((4, 4, 4), 200, np.uint8), None, MaskMode.ALPHA, MaskRejected),
        (OPAQUE, np.zeros((8, 8, 3), np.uint8), MaskMode.AUTO, MaskSizeMismatch),
        (OPAQUE, np.zeros((8, 6, 3), np.uint8), MaskMode.AUTO, MaskSizeMismatch),
    ],
)
def test_refused(image: Pixels, mask: Pixels | None, mode: MaskMode, kind: type[GiornataError]) -> None:
    with pytest.raises(kind) as caught:
        edited_region(image, mask, mode)
    assert caught.value.accepted


def test_a_mask_of_another_size_is_resized() -> None:
    image = np.zeros((60, 80, 3), np.uint8)
    region = edited_region(image, WHITE_BOX, MaskMode.AUTO)
    np.testing.assert_array_equal(region, BOX.repeat(10, axis=0).repeat(10, axis=1))
    back = edited_region(OPAQUE, painted(region, (255,) * 3, (0,) * 3), MaskMode.AUTO)
    np.testing.assert_array_equal(back, BOX)


def test_nearly_the_same_aspect_is_accepted() -> None:
    assert edited_region(
        np.zeros((100, 100, 3), np.uint8), np.full((100, 102, 3), 255, np.uint8), MaskMode.AUTO
    ).all()


def test_nearest_is_centred() -> None:
    region = np.array([[True, False, False, False, False, True]])
    np.testing.assert_array_equal(nearest(region, Size(3, 1)), [[False, False, True]])
    np.testing.assert_array_equal(nearest(region, Size(2, 1)), [[False, False]])


def disc(radius: int) -> Region:
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    result: Region = x * x + y * y <= radius * radius
    return result


@given(region=REGIONS, radius=st.integers(0, 9))
def test_growing_is_dilation_by_a_disc(region: Region, radius: int) -> None:
    expected = ndimage.binary_dilation(region, disc(radius))
    np.testing.assert_array_equal(effective_alpha(region, radius, 0.0) == 1, expected)


@pytest.mark.parametrize("grow", [0, 3])
def test_the_feather_is_a_gaussian_of_the_distance(grow: int) -> None:
    region = np.zeros((1, 101), np.bool_)
    region[0, :11] = True
    alpha = effective_alpha(region, grow, 4.0)[0]
    assert (alpha[: 11 + grow] == 1).all()
    for distance in range(1, 30):
        expected = math.exp(-0.5 * (distance / 4) ** 2)
        assert alpha[10 + grow + distance] == pytest.approx(
            expected if expected >= MIN_ALPHA else 0, abs=1 / LEVELS
        )


@given(region=REGIONS, grow=st.integers(0, 6), blur=st.floats(0, 5))
def test_effective_alpha_keeps_its_promises(region: Region, grow: int, blur: float) -> None:
    alpha = effective_alpha(region, grow, blur)
    assert alpha.dtype == np.float32
    assert alpha.shape == region.shape
    assert (alpha[region] == 1).all()
    assert ((alpha == 0) | ((alpha >= MIN_ALPHA) & (alpha <= 1))).all()
    if region.any():
        distance = ndimage.distance_transform_edt(~region)
        assert (alpha[distance > grow + REACH_PER_SIGMA * blur + 1e-3] == 0).all()
    else:
        assert not alpha.any()


@given(region=REGIONS, grow=st.integers(0, 6))
def test_by_default_no_pixel_outside_is_touched_and_each_part_inside_is_painted(
    region: Region, grow: int
) -> None:
    alpha = effective_alpha(region, grow, None)
    grown = effective_alpha(region, grow, 0.0) > 0
    np.testing.assert_array_equal(alpha > 0, grown)
    assert alpha.dtype == np.float32
    assert (alpha <= 1).all()
    depth = ndimage.distance_transform_edt(grown) if not grown.all() else np.full(grown.shape, math.inf)
    assert (alpha[depth >= 2 * EDGE_PX] == 1).all()
    parts, count = ndimage.label(grown, np.ones((3, 3)))
    for part in range(1, count + 1):
        assert alpha[parts == part].max() == 1, "even a strip of one pixel has its middle painted in full"


def test_the_default_edge_rises_evenly_and_less_where_the_mask_is_narrow() -> None:
    region = np.zeros((40, 60), np.bool_)
    region[10:30, 5:] = True
    alpha = effective_alpha(region, 0, None)
    np.testing.assert_allclose(alpha[20, 3:11], [0, 0, 0.104, 0.352, 0.648, 0.896, 1, 1], atol=1 / LEVELS)
    assert alpha[20, 59] == 1, "the picture's border is no edge"
    for width, expected in ((1, [1]), (2, [1, 1]), (3, [1, 1, 1]), (5, [0.5, 1, 1, 1, 0.5])):
        strip = np.zeros((40, 60), np.bool_)
        strip[10 : 10 + width] = True
        np.testing.assert_allclose(
            effective_alpha(strip, 0, None)[10 : 10 + width, 30], expected, atol=1 / LEVELS
        )


def test_large_radii_reach_the_whole_picture() -> None:
    region = np.zeros((50, 70), np.bool_)
    region[0, 0] = True
    assert (effective_alpha(region, 512, 0.0) == 1).all()
    assert (effective_alpha(region, 0, 256.0) > 0.9).all()


def touched_by_definition(alpha: np.ndarray[Any, Any], size: Size) -> Region:
    """Each model pixel covers an area of the image; any overlap with an alpha above 0 counts."""
    height, width = alpha.shape
    result = np.zeros((size.height, size.width), np.bool_)
    for y, x in np.argwhere(alpha > 0).tolist():
        rows = slice(y * size.height // height, -(-(y + 1) * size.height // height))
        columns = slice(x * size.width // width, -(-(x + 1) * size.width // width))
        result[rows, columns] = True
    return result


@given(region=REGIONS, tokens=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_the_models_mask_is_every_pixel_touched(region: Region, tokens: tuple[int, int]) -> None:
    alpha = region.astype(np.float32) * np.float32(0.01)
    size = Size(16 * tokens[0], 16 * tokens[1])
    expected = touched_by_definition(alpha, size)
    np.testing.assert_array_equal(model_mask(alpha, size), expected)
    whole = model_mask(alpha, size, grain=8)
    np.testing.assert_array_equal(whole, pool_cells(expected, 8).repeat(8, axis=0).repeat(8, axis=1))
    np.testing.assert_array_equal(pool_cells(whole, 16), pool_cells(expected, 16))


@pytest.mark.parametrize("token_px", [8, 16, 32, 64])
@given(data=st.data(), halo=st.integers(0, 4))
def test_a_halo_counts_16_pixels_over_tiles(token_px: int, data: st.DataObject, halo: int) -> None:
    """A tile is computed where it touches the mask, grown by so many pixels, of cells that the mask touches."""
    sides = st.integers(1, 256 // token_px)
    size = Size(token_px * data.draw(sides), token_px * data.draw(sides))
    mask = np.zeros((size.height, size.width), np.bool_)
    for _ in range(data.draw(st.integers(1, 2))):
        mask[data.draw(st.integers(0, size.height - 1)), data.draw(st.integers(0, size.width - 1))] = True
    near_px = halo * min(16, token_px)
    grown = np.zeros_like(mask)
    for y, x in np.argwhere(
        mask if token_px > 16 else pool_cells(mask, token_px).repeat(token_px, 0).repeat(token_px, 1)
    ):
        grown[max(0, y - near_px) : y + near_px + 1, max(0, x - near_px) : x + near_px + 1] = True
    expected = pool_cells(grown, token_px)
    found = compute_set(mask, halo, token_px)
    if found is None:
        assert expected.all()
        return
    bits = np.unpackbits(np.frombuffer(found.bits, np.uint8), count=expected.size)
    np.testing.assert_array_equal(bits.reshape(expected.shape).astype(bool), expected)


@given(
    arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 30), st.integers(1, 30)),
        elements=st.sampled_from([np.float32(n) / np.float32(LEVELS) for n in (0, 1, 8, 1234, LEVELS)]),
    )
)
def test_an_alpha_comes_out_as_it_went_in(alpha: Alpha) -> None:
    found = unpack_alpha(pack_alpha(alpha))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, alpha)


@pytest.mark.parametrize(("grow", "blur"), [(4, 4.0), (64, 32.0), (0, None)])
def test_a_feathered_mask_is_a_fraction_of_its_pixels(grow: int, blur: float | None) -> None:
    """A wide feather as well: many large pictures in progress would fill the store with theirs."""
    region = np.zeros((512, 512), np.bool_)
    region[100:300, 150:400] = True
    alpha = effective_alpha(region, grow, blur)
    data = pack_alpha(alpha)
    assert len(data) < alpha.nbytes / 20
    np.testing.assert_array_equal(unpack_alpha(data), alpha)
