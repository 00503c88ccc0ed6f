"""The two stages without torch: inspect before, finish after."""

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
from giornata.wire.errors import InvalidField, MaskEmpty, TooManyPixels
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters, MaskMode
from giornata_prepost.images.geometry import Box
from giornata_prepost.images.pictures import Pixels, flatten
from giornata_prepost.images.stages import InspectedEdit, PixelLimits, finish, inspect, read_edit

LIMITS = PixelLimits(max_pixels=500_000, budget_pixels=128 * 128)
SCENE = np.random.default_rng(3).integers(0, 256, (160, 240, 3), np.uint8)


def card(family: Family = Family.FLUX_FILL, digest: str = "d1") -> ModelCard:
    return ModelCard(
        name="tiny", family=family, digest=digest, vae_scale_factor=8, latent_channels=16,
        max_text_tokens=48, takes_guidance=True, takes_true_cfg=False, default_steps=4,
        default_guidance_scale=30.0, default_strength=1.0, mask_grain=8 if family is Family.FLUX_INPAINT else 1,
    )  # fmt: skip


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


@pytest.mark.parametrize("channels", [3, 4])
def test_finish_changes_the_edited_pixels_only(channels: int) -> None:
    random = np.random.default_rng(5)
    original = random.integers(0, 256, (160, 240, channels), np.uint8)
    painted = np.full((96, 144, 3), (10, 200, 30), np.uint8)
    result = finished(
        file(original), box(top=10, left=20, bottom=50, right=80), asked(mask_mode="white"), painted
    )
    output = np.asarray(Image.open(BytesIO(result)))
    inside = np.zeros((160, 240), np.bool_)
    inside[10:50, 20:80] = True
    np.testing.assert_array_equal(output[~inside], original[~inside])
    assert (output[inside][:, :3] == (10, 200, 30)).all()
    assert output.shape == original.shape


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


def test_equal_masks_have_one_key_whatever_their_files_and_a_pixel_makes_another() -> None:
    mask = np.zeros(SCENE.shape[:2], np.uint8)
    mask[40:80, 40:80] = 255

    def found(given_mask: Pixels, **options: Any) -> InspectedEdit:
        return inspect(file(SCENE), file(given_mask, **options), asked(), card(), LIMITS)

    first = found(mask)
    assert found(mask, compress_level=0).measures.mask_key == first.measures.mask_key
    assert found(np.roll(mask, 8, axis=1)).measures.mask_key != first.measures.mask_key
    assert not first.measures.mask_whole
    whole = found(np.full_like(mask, 255))
    assert whole.measures.mask_whole
    assert whole.measures.mask_key != first.measures.mask_key
