"""The two stages without torch: inspect before, finish after; of one region or several."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load

from giornata.families import Family
from giornata.wire.errors import InvalidField, MaskEmpty, SizeMismatch, TooManyPixels
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters, MaskMode
from giornata_prepost.images.masks import Alpha, paste, place_painted, resize, resize_alpha
from giornata_prepost.images.pictures import Box, Pixels, Size, flatten
from giornata_prepost.images.stages import (
    InspectedEdit,
    PixelLimits,
    finish,
    finish_regions,
    inspect,
    inspect_regions,
    read_edit,
)
from tests.fakes.fleet import CARD

LIMITS = PixelLimits(max_pixels=500_000, budget_pixels=128 * 128)
SCENE = np.random.default_rng(3).integers(0, 256, (160, 240, 3), np.uint8)


def card(family: Family = Family.FLUX_FILL, digest: str = "d1") -> ModelCard:
    grain = 8 if family is Family.FLUX_INPAINT else 1
    return CARD.model_copy(update={"family": family, "digest": digest, "mask_grain": grain})


def file(pixels: Pixels, form: str = "PNG", **options: Any) -> bytes:
    target = BytesIO()
    Image.fromarray(pixels).save(target, form, **options)
    return target.getvalue()


def box(*, top: int, left: int, bottom: int, right: int) -> bytes:
    mask = np.zeros(SCENE.shape[:2], np.uint8)
    mask[top:bottom, left:right] = 255
    return file(mask)


def asked(**fields: Any) -> EditParameters:
    return EditParameters(prompt="a hat", mask_blur=fields.pop("mask_blur", 0.0), **fields)


def inspected(
    image: bytes = file(SCENE), mask: bytes | None = None, family: Family = Family.FLUX_FILL, **fields: Any
) -> InspectedEdit:
    return inspect(image, mask, asked(**fields), card(family), LIMITS)


def finished(
    image: bytes, mask: bytes | None, parameters: EditParameters, painted: Pixels, crop: Any = None
) -> bytes:
    """What `finish` makes of an edit once it is inspected."""
    alpha = inspect(image, mask, parameters, card(), LIMITS).alpha
    return finish(image, alpha, parameters, LIMITS, painted, crop)


def test_measures() -> None:
    result = inspected(mask=box(top=0, left=0, bottom=40, right=60))
    assert (
        (result.measures.width, result.measures.height)
        == (result.measures.output_width, result.measures.output_height)
        == (240, 160)
    )
    assert (result.measures.model_width, result.measures.model_height) == (144, 96)
    assert result.measures.tokens == 9 * 6
    # 40 of 160 rows are 24 of 96, that is 2 of 6 tokens; 60 of 240 columns are 36 of 144, that is 3 of 9
    assert result.measures.compute_tokens == 6
    assert result.measures.mask_ratio == 6 / 54
    assert not result.measures.has_alpha


def test_prepared_pixels() -> None:
    blob = load(inspected(mask=box(top=0, left=0, bottom=40, right=60)).prepared)
    expected = np.asarray(Image.fromarray(SCENE).resize((144, 96), Image.Resampling.LANCZOS))
    np.testing.assert_array_equal(blob["image"], expected)
    mask = np.zeros((96, 144), np.uint8)
    mask[:24, :36] = 255
    np.testing.assert_array_equal(blob["mask"], mask)


def test_flux_inpaint_gets_whole_latents() -> None:
    mask = box(top=0, left=0, bottom=40, right=60)
    whole = load(inspected(mask=mask, family=Family.FLUX_INPAINT).prepared)["mask"]
    assert (whole == 255).sum() == 24 * 40
    assert inspected(mask=mask, family=Family.FLUX_INPAINT).measures.compute_tokens == 6


def test_transparency_is_seen_on_white() -> None:
    clear = np.dstack([SCENE, np.zeros(SCENE.shape[:2], np.uint8)])
    clear[80:, :, 3] = 255
    result = inspected(file(clear))
    assert result.measures.has_alpha
    assert result.measures.mask_ratio == 0.5
    image = load(result.prepared)["image"]
    assert image[:40].min() == 255
    np.testing.assert_array_equal(
        image, np.asarray(Image.fromarray(flatten(clear)).resize((144, 96), Image.Resampling.LANCZOS))
    )


def test_a_background_is_the_images_or_opaque() -> None:
    clear = np.dstack([SCENE, np.zeros(SCENE.shape[:2], np.uint8)])
    clear[80:, :, 3] = 255
    assert inspected(file(clear), background="transparent").measures.has_alpha
    assert not inspected(file(clear), background="opaque").measures.has_alpha
    with pytest.raises(InvalidField, match="this image has none") as refused:
        inspected(mask=box(top=0, left=0, bottom=40, right=60), background="transparent")
    assert refused.value.field == "background"
    for background, mode in {"auto": "RGBA", "opaque": "RGB", "transparent": "RGBA"}.items():
        parameters = EditParameters.model_validate({"prompt": "x", "background": background})
        alpha = inspected(file(clear), background=background).alpha
        made = Image.open(
            BytesIO(finish(file(clear), alpha, parameters, LIMITS, np.zeros((96, 144, 3), np.uint8)))
        )
        assert made.mode == mode
        if mode == "RGB":
            np.testing.assert_array_equal(np.asarray(made)[120:], SCENE[120:])


def test_the_template_key_follows_the_pixels_and_the_model_only() -> None:
    mask = box(top=0, left=0, bottom=40, right=60)
    key = inspected().measures.template_key
    assert len(key) == 64
    assert (
        inspected(mask=mask, grow_mask=3, mask_blur=2.0, size="480x320", seed=9).measures.template_key == key
    )
    assert inspected(file(SCENE, compress_level=0)).measures.template_key == key
    other = SCENE.copy()
    other[0, 0] ^= 255
    keys = {
        key,
        inspected(file(other)).measures.template_key,
        inspected(file(np.ascontiguousarray(SCENE[:, :-16]))).measures.template_key,
        inspected(family=Family.FLUX_INPAINT).measures.template_key,
        inspect(file(SCENE), None, asked(), card(digest="d2"), LIMITS).measures.template_key,
    }
    assert len(keys) == 5


def test_limits_hold_for_image_mask_and_output() -> None:
    large = file(np.zeros((1000, 1500, 3), np.uint8))
    with pytest.raises(TooManyPixels) as image:
        inspected(large)
    with pytest.raises(TooManyPixels) as mask:
        inspected(mask=large)
    with pytest.raises(TooManyPixels) as size:
        inspected(size="2400x1600")
    assert [caught.value.field for caught in (image, mask, size)] == ["image", "mask", "size"]


@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
def test_finish_answers_in_the_format_and_size_asked_for(form: str) -> None:
    result = finished(
        file(SCENE), None, asked(output_format=form, size="120x80"), np.zeros((96, 144, 3), np.uint8)
    )
    with Image.open(BytesIO(result)) as image:
        assert image.format == form.upper()
        assert image.size == (120, 80)


def test_an_upright_answer_carries_no_orientation() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    result = finished(file(SCENE, "JPEG", exif=exif), None, asked(), np.zeros((144, 96, 3), np.uint8))
    with Image.open(BytesIO(result)) as image:
        assert image.size == (160, 240)
        assert 0x0112 not in image.getexif()


def small(native: int = 64, family: Family = Family.FLUX_FILL) -> ModelCard:
    return card(family).model_copy(update={"native_size": native})


def test_a_crop_is_what_the_model_sees_and_nothing_else_of_the_picture() -> None:
    mask = box(top=60, left=100, bottom=84, right=132)
    fields = asked(padding_mask_crop=8)
    found = inspect(file(SCENE), mask, fields, small(), LIMITS)
    assert found.measures.crop == (92, 48, 48, 48)  # 32 + 2 * 8 wide, and as high around the same centre
    assert (found.measures.model_width, found.measures.model_height, found.measures.tokens) == (64, 64, 16)
    assert (
        found.measures.width,
        found.measures.height,
        found.measures.output_width,
        found.measures.output_height,
    ) == (240, 160, 240, 160)
    blob = load(found.prepared)
    cut = Image.fromarray(SCENE[48:96, 92:140]).resize((64, 64), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(blob["image"], np.asarray(cut))
    # 8..40 of 48 are 10.67..53.3 of 64; 12..36 are 16..48: every pixel that is touched
    expected = np.zeros((64, 64), np.uint8)
    expected[16:48, 10:54] = 255
    np.testing.assert_array_equal(blob["mask"], expected)
    assert found.measures.compute_tokens == 2 * 4
    assert found.measures.mask_ratio == 0.5
    changed = SCENE.copy()
    changed[:48] ^= 255
    assert (
        inspect(file(changed), mask, fields, small(), LIMITS).measures.template_key
        == found.measures.template_key
    )
    assert inspect(file(SCENE), mask, asked(), small(), LIMITS).measures.crop is None


def test_a_crop_holds_what_grow_and_blur_add() -> None:
    mask = box(top=60, left=100, bottom=84, right=132)
    grown = inspect(file(SCENE), mask, asked(padding_mask_crop=0, grow_mask=10), small(), LIMITS)
    assert grown.measures.crop == (90, 46, 52, 52)
    blurred = inspect(file(SCENE), mask, asked(padding_mask_crop=0, mask_blur=4.0), small(), LIMITS)
    assert blurred.measures.crop == (86, 42, 60, 60)  # 3.53 sigmas


def test_a_crop_without_a_mask_is_the_whole_picture_at_the_models_size() -> None:
    found = inspect(file(SCENE), None, asked(padding_mask_crop=5), small(96), LIMITS)
    assert found.measures.crop == (0, 0, 240, 160)
    assert (found.measures.model_width, found.measures.model_height) == (112, 64)
    with pytest.raises(MaskEmpty):
        inspect(
            file(SCENE), file(np.zeros((160, 240), np.uint8)), asked(padding_mask_crop=5), small(), LIMITS
        )


def test_a_crop_is_of_the_upright_picture() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned clockwise for showing
    stored = file(SCENE, exif=exif)
    upright = np.rot90(SCENE, -1)
    mask = np.zeros((240, 160), np.uint8)
    mask[200:216, 8:24] = 255
    found = inspect(stored, file(mask), asked(padding_mask_crop=0), small(16), LIMITS)
    assert found.measures.crop == (8, 200, 16, 16)
    np.testing.assert_array_equal(load(found.prepared)["image"], upright[200:216, 8:24])


@given(
    marks=st.lists(
        st.tuples(st.integers(0, 100), st.integers(0, 150), st.integers(1, 40), st.integers(1, 60)),
        min_size=1,
        max_size=4,
    ),
    padding=st.none() | st.integers(0, 200),
    grow=st.sampled_from([0, 0, 3, 20]),
    blur=st.none() | st.floats(0, 6),
    channels=st.sampled_from([3, 4]),
    family=st.sampled_from(Family),
)
def test_whatever_is_cropped_the_rest_of_the_picture_stays_exact(
    marks: list[tuple[int, int, int, int]],
    padding: int | None,
    grow: int,
    blur: float | None,
    channels: int,
    family: Family,
) -> None:
    """Invariants 5 and 9: a lossless output equals the original where the effective alpha is 0.

    By default that is every pixel outside the user's mask, whatever the model paints.
    """
    original = np.random.default_rng(len(marks)).integers(0, 256, (104, 160, channels), np.uint8)
    mask = np.zeros(original.shape[:2], np.uint8)
    for top, left, height, width in marks:
        mask[top : top + height, left : left + width] = 255
    fields = EditParameters(
        prompt="a hat", padding_mask_crop=padding, grow_mask=grow, mask_blur=blur, mask_mode=MaskMode.WHITE
    )
    found = inspect(file(original), file(mask), fields, small(family=family), LIMITS)
    painted = np.full((found.measures.model_height, found.measures.model_width, 3), (10, 200, 30), np.uint8)
    crop = found.measures.crop
    output = np.asarray(
        Image.open(BytesIO(finish(file(original), found.alpha, fields, LIMITS, painted, crop)))
    )
    _, alpha = read_edit(file(original), file(mask), fields, LIMITS)
    np.testing.assert_array_equal(output[alpha == 0], original[alpha == 0])
    assert (output[alpha == 1][:, :3] == (10, 200, 30)).all()
    assert (output[mask > 0][:, :3] != original[mask > 0][:, :3]).any()
    if blur is None and not grow:
        assert not alpha[mask == 0].any()
    assert (crop is None) == (padding is None)
    inside = np.zeros(alpha.shape, np.bool_)
    inside[Box(*crop).window if crop else ...] = True
    assert not alpha[~inside].any()
    assert found.measures.compute_tokens >= 1


@pytest.mark.parametrize("size", ["480x320", "120x80", "241x160"])
@pytest.mark.parametrize("blur", [0.0, 3.0, None])
def test_a_crop_is_pasted_at_another_output_size_too(size: str, blur: float | None) -> None:
    mask = box(top=60, left=100, bottom=84, right=132)
    fields = asked(padding_mask_crop=0, mask_blur=blur, size=size)
    found = inspect(file(SCENE), mask, fields, small(), LIMITS)
    painted = np.full((found.measures.model_height, found.measures.model_width, 3), (10, 200, 30), np.uint8)
    cropped = finished(file(SCENE), mask, fields, painted, found.measures.crop)
    whole = finished(file(SCENE), mask, fields, painted)  # of one colour: where it goes does not matter
    np.testing.assert_array_equal(
        np.asarray(Image.open(BytesIO(cropped))), np.asarray(Image.open(BytesIO(whole)))
    )


# Regions that are painted one by one: measured and pasted as edits of their crops would be, one after the
# other.


FILE = file(SCENE)
REGIONS = [box(top=10, left=20, bottom=50, right=60), box(top=90, left=150, bottom=120, right=200)]


def shown(data: bytes) -> Any:
    return np.asarray(Image.open(BytesIO(data)))


def painted(height: int, width: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("fields", [{}, {"grow_mask": 3, "mask_blur": 2.0}, {"size": "480x320"}])
def test_one_region_is_an_edit_of_its_crop(fields: dict[str, Any]) -> None:
    parameters = asked(padding_mask_crop=8, **fields)
    edit = inspect(FILE, REGIONS[0], parameters, card(), LIMITS)
    alone = inspect_regions(FILE, REGIONS[:1], parameters, card(), LIMITS)
    assert alone.measures.crops == (edit.measures.crop,)
    for name in (
        "width",
        "model_width",
        "model_height",
        "output_width",
        "tokens",
        "compute_tokens",
        "mask_ratio",
    ):
        assert getattr(alone.measures, name) == getattr(edit.measures, name), name
    ours, theirs = load(alone.prepared), load(edit.prepared)
    assert np.array_equal(ours["image_0"], theirs["image"])
    assert np.array_equal(ours["mask_0"], theirs["mask"])
    picture = painted(edit.measures.model_height, edit.measures.model_width, 1)
    if "size" not in fields:
        pasted = finish_regions(FILE, alone.alpha, parameters, LIMITS, [picture], alone.measures.crops)
        assert pasted == finish(FILE, edit.alpha, parameters, LIMITS, picture, edit.measures.crop)


def test_several_regions_are_edits_one_after_the_other() -> None:
    parameters = asked(padding_mask_crop=8)
    found = inspect_regions(FILE, REGIONS, parameters, card(), LIMITS)
    pictures = [painted(found.measures.model_height, found.measures.model_width, seed) for seed in range(2)]
    expected = FILE
    for region, picture in zip(REGIONS, pictures, strict=True):
        edit = inspect(expected, region, parameters, card(), LIMITS)
        assert edit.measures.model_width == found.measures.model_width
        assert edit.measures.model_height == found.measures.model_height
        expected = finish(expected, edit.alpha, parameters, LIMITS, picture, edit.measures.crop)
    pasted = shown(finish_regions(FILE, found.alpha, parameters, LIMITS, pictures, found.measures.crops))
    assert np.array_equal(pasted, shown(expected))
    outside = (shown(REGIONS[0]) | shown(REGIONS[1])) == 0
    assert np.array_equal(pasted[outside], SCENE[outside])
    assert found.measures.template_key == ""
    assert found.measures.compute_set is None
    assert found.measures.compute_tokens / (2 * found.measures.tokens) == pytest.approx(
        found.measures.mask_ratio
    )


def test_another_output_size_is_resized_to_once() -> None:
    parameters = asked(padding_mask_crop=8, size="480x320")
    found = inspect_regions(FILE, REGIONS, parameters, card(), LIMITS)
    pictures = [painted(found.measures.model_height, found.measures.model_width, seed) for seed in range(2)]
    whole = asked(padding_mask_crop=8)
    small = finish_regions(FILE, found.alpha, whole, LIMITS, pictures, found.measures.crops)
    large = finish_regions(FILE, found.alpha, parameters, LIMITS, pictures, found.measures.crops)
    expected = Image.open(BytesIO(small)).resize((480, 320), Image.Resampling.LANCZOS)
    assert np.array_equal(shown(large), np.asarray(expected))


def test_bad_regions_and_sizes_are_refused_as_those_of_an_edit() -> None:
    with pytest.raises(MaskEmpty):
        inspect_regions(FILE, [file(np.zeros(SCENE.shape[:2], np.uint8))], asked(), card(), LIMITS)
    with pytest.raises(SizeMismatch):
        inspect_regions(FILE, REGIONS, asked(size="100x100"), card(), LIMITS)


# Compositing: nothing changes where alpha is 0.


@st.composite
def edits(draw: st.DrawFn) -> tuple[Pixels, Alpha, Pixels]:
    """An original, an effective alpha with zeros, ones and a feather, a painted picture of another size."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    height, width = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    original = random.integers(0, 256, (height, width, draw(st.sampled_from([3, 4]))), np.uint8)
    alpha = random.uniform(-0.5, 1.5, (height, width)).clip(0, 1).astype(np.float32)
    painted = random.integers(0, 256, (draw(st.integers(1, 40)), draw(st.integers(1, 40)), 3), np.uint8)
    return original, alpha, painted


@given(edit=edits())
def test_a_painted_picture_is_seen_as_much_as_alpha_says(edit: tuple[Pixels, Alpha, Pixels]) -> None:
    """Not at all where it is 0, alone and opaque where it is 1, and else as the weighted mean of opaque pictures."""
    original, alpha, painted = edit
    before = original.copy()
    output = paste(original, alpha, painted)
    there = resize(painted, Size(original.shape[1], original.shape[0]))
    np.testing.assert_array_equal(original, before)
    assert output.shape == original.shape
    assert output.dtype == np.uint8
    np.testing.assert_array_equal(output[alpha == 0], original[alpha == 0])
    np.testing.assert_array_equal(output[alpha == 1][:, :3], there[alpha == 1])
    assert (output[alpha == 1][:, 3:] == 255).all()
    rgb = original[..., :3]
    opaque = paste(rgb, alpha, painted).astype(float)
    expected = rgb * (1 - alpha[..., None].astype(float)) + there.astype(float) * alpha[..., None]
    assert np.abs(opaque - expected).max() <= 0.5 + 1e-3
    rgba = paste(np.dstack([rgb, np.full(rgb.shape[:2], 255, np.uint8)]), alpha, painted)
    assert np.abs(rgba[..., :3] - opaque).max() <= 1
    assert (rgba[..., 3] == 255).all()


def test_colours_hidden_under_transparency_do_not_shine_through() -> None:
    hidden = np.zeros((1, 1, 4), np.uint8)
    hidden[..., 1] = 255
    red = np.array([[[255, 0, 0]]], np.uint8)
    assert paste(hidden, np.full((1, 1), 0.5, np.float32), red)[0, 0].tolist() == [255, 0, 0, 128]


def test_another_output_size_resizes_the_original_first() -> None:
    random = np.random.default_rng(0)
    original = random.integers(0, 256, (30, 40, 4), np.uint8)
    painted = random.integers(0, 256, (16, 16, 3), np.uint8)
    alpha = np.zeros((30, 40), np.float32)
    alpha[10:20, 10:20] = 1
    output = paste(original, alpha, painted, Size(80, 60))
    there = np.asarray(Image.fromarray(original).resize((80, 60), Image.Resampling.LANCZOS))
    scaled = resize_alpha(alpha, Size(80, 60))
    assert output.shape == (60, 80, 4)
    np.testing.assert_array_equal(output[scaled == 0], there[scaled == 0])
    assert (scaled[24:36, 24:36] == 1).all()
    assert (scaled[:16] == 0).all()


@given(scale=st.integers(1, 4), value=st.floats(0, 1, width=32))
def test_resized_alpha_stays_in_range(scale: int, value: float) -> None:
    alpha = np.full((8, 8), value, np.float32)
    alpha[:4] = 0
    for size in (Size(8 * scale, 8 * scale), Size(8 // scale, 8 // scale)):
        resized = resize_alpha(alpha, size)
        assert resized.dtype == np.float32
        assert resized.shape == (size.height, size.width)
        assert resized.min() >= 0
        assert resized.max() <= 1


@pytest.mark.parametrize("channels", [3, 4])
def test_nothing_is_resized_where_sizes_agree(channels: int) -> None:
    pixels = np.zeros((4, 5, channels), np.uint8)
    assert resize(pixels, Size(5, 4)) is pixels


@given(
    crop=st.builds(Box, st.integers(0, 30), st.integers(0, 20), st.integers(4, 40), st.integers(4, 30)),
    output=st.builds(Size, st.integers(20, 300), st.integers(20, 300)),
    painted=st.builds(Size, st.integers(4, 100), st.integers(4, 100)),
)
def test_a_crop_lands_where_it_was_cut(crop: Box, output: Size, painted: Size) -> None:
    """A ramp over the original, seen through the crop, is the same ramp over the output, to a level of its steps."""
    original = Size(70, 50)
    x = (crop.left + (np.arange(painted.width) + 0.5) / painted.width * crop.width) / original.width
    y = (crop.top + (np.arange(painted.height) + 0.5) / painted.height * crop.height) / original.height
    ramp = np.dstack(
        [np.tile(x, (painted.height, 1)), np.tile(y[:, None], (1, painted.width)), np.zeros(painted[::-1])]
    )
    place, pixels = place_painted((ramp * 255).round().astype(np.uint8), crop, original, output)
    assert pixels.shape == (place.height, place.width, 3)
    ends = [(crop.left, crop.left + crop.width), (crop.top, crop.top + crop.height)]
    for axis, limit in enumerate((original.width, original.height)):
        start, length, total = place[axis], place[axis + 2], output[axis]
        assert 0 <= start < start + length <= total
        there = (start + np.arange(length) + 0.5) / total
        expected = there.clip(ends[axis][0] / limit, ends[axis][1] / limit) * 255
        found = pixels.mean(axis=axis)[:, axis]
        step = 255 / limit * ((ends[axis][1] - ends[axis][0]) / painted[axis] + limit / total)
        assert np.abs(found - expected).max() <= step + 2
        assert start <= max(0, ends[axis][0] / limit * total - 1) + 1e-9  # the reach of resized alpha
        assert start + length >= min(total, ends[axis][1] / limit * total + 1) - 1e-9


def test_at_the_originals_size_a_crop_is_resized_to_its_box_and_no_more() -> None:
    painted = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    place, pixels = place_painted(painted, Box(5, 6, 32, 20), Size(70, 50), Size(70, 50))
    assert place == (5, 6, 32, 20)
    np.testing.assert_array_equal(pixels, resize(painted, Size(32, 20)))
