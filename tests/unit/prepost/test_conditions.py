"""How references and control images are decoded, sized and drawn."""

from __future__ import annotations

import io
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import VAE_IMAGE_SIZE, calculate_dimensions
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load
from scipy.ndimage import gaussian_filter, label

from giornata.families import Family
from giornata.wire.adapters import Annotator, ControlUse
from giornata.wire.errors import GiornataError, SizeMismatch
from giornata_prepost.images import conditions, pictures
from giornata_prepost.images.conditions import (
    ANNOTATORS,
    CANNY_HIGH,
    CANNY_LOW,
    MAX_PIXELS,
    ModelCrop,
    canny,
    control_images,
    crop_control,
    cropped,
    of_edit_plus,
    of_kontext,
    prepare,
    scale_part,
    soft_edge,
    tile,
)
from giornata_prepost.images.pictures import Box, Pixels, Size, flatten
from giornata_prepost.images.stages import ControlFiles, inspect
from tests.fakes.fleet import CARD
from tests.present import present
from tests.unit.prepost.test_stages import LIMITS, SCENE, asked, box, card, file

KLEIN = CARD.model_copy(update={"family": Family.FLUX2_KLEIN, "references": 1, "max_references": 4})
PIXELS = 1 << 24


def file_of(width: int, height: int) -> bytes:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


def test_small_references_are_cut_to_tokens_around_their_middle() -> None:
    files = [file_of(70, 100), file_of(32, 16)]
    found = prepare(files, KLEIN, PIXELS, PIXELS)
    assert found.grids == ((6, 4), (1, 2))
    assert found.packed is not None
    kept = load(found.packed)
    for name, data, cut in (
        ("reference_0", files[0], (3, 2, 67, 98)),
        ("reference_1", files[1], (0, 0, 32, 16)),
    ):
        assert np.array_equal(kept[name], np.asarray(Image.open(io.BytesIO(data)).crop(cut)))


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(256, 1 << 22))
def test_a_reference_fits_its_limits(width: int, height: int, most: int) -> None:
    for sizing in (cropped, of_kontext):
        scaled, box = sizing(Size(width, height), most, 16)
        assert box.width % 16 == box.height % 16 == 0
        assert 0 < box.width * box.height <= (min(most, MAX_PIXELS) if sizing is cropped else most)
        assert 0 <= box.left <= scaled.width - box.width
        assert 0 <= box.top <= scaled.height - box.height


@pytest.mark.parametrize(
    ("picture", "size"), [((512, 512), (1024, 1024)), ((300, 200), (1248, 832)), ((100, 900), (672, 1568))]
)
def test_kontext_takes_the_training_size_of_the_nearest_aspect_ratio(
    picture: tuple[int, int], size: tuple[int, int]
) -> None:
    assert of_kontext(Size(*picture), PIXELS, 16).scaled == size


@given(st.integers(32, 4000), st.integers(32, 4000))
def test_qwen_edit_plus_scales_a_reference_as_its_pipeline_does(width: int, height: int) -> None:
    """As long as that rounds no side to nothing, and to no more pixels than a strip may have."""
    found = of_edit_plus(Size(width, height), PIXELS, 16)
    wanted = calculate_dimensions(VAE_IMAGE_SIZE, width / height)
    assert found.scaled == tuple(max(32, side) for side in wanted)
    assert found.cut_out == (0, 0, *found.scaled)


@pytest.mark.parametrize(
    ("picture", "most", "size"),
    [
        ((300, 200), PIXELS, (1248, 832)),
        ((300, 200), 256**2, (320, 224)),
        ((9000, 1), PIXELS, (32768, 32)),
        ((1, 9000), 256**2, (32, 2048)),
        ((64, 64), 256, (32, 32)),
    ],
)
def test_a_reference_of_qwen_edit_plus_has_about_so_many_pixels(
    picture: tuple[int, int], most: int, size: tuple[int, int]
) -> None:
    assert of_edit_plus(Size(*picture), most, 16).scaled == size


@pytest.mark.parametrize(
    ("data", "most", "code"),
    [(b"GIF89a", PIXELS, "unsupported_image_format"), (file_of(64, 64)[:-40], PIXELS, "image_unreadable"),
     (file_of(64, 64), 64, "too_many_pixels")],
)  # fmt: skip
def test_what_cannot_be_decoded_names_the_field(data: bytes, most: int, code: str) -> None:
    with pytest.raises(GiornataError) as raised:
        prepare([data], KLEIN, most, most)
    assert (raised.value.code, raised.value.field) == (code, "reference")


# Control images follow the picture: the same part of it, resized alike, and what annotators draw of it.


MOST = 1 << 20
CONTROL = np.random.default_rng(7).integers(0, 256, (160, 240, 3), np.uint8)


def use(image: int | None = 0, annotator: Annotator | None = None) -> ControlUse:
    return ControlUse(model="outline", digest="d", image=image, annotator=annotator)


def upright(pixels: Pixels) -> bytes:
    """A file whose EXIF block says that it lies on its side."""
    exif = Image.Exif()
    exif[0x0112] = 6
    target = BytesIO()
    Image.fromarray(np.rot90(pixels)).save(target, "PNG", exif=exif)
    return target.getvalue()


def made(*uses: ControlUse, files: tuple[bytes, ...] = (), **fields: Any) -> dict[str, Pixels]:
    mask = box(top=70, left=100, bottom=90, right=140)
    found = inspect(file(SCENE), mask, asked(**fields), card(), LIMITS, (), ControlFiles(files, uses))
    named = load(present(found.controls))
    assert all(
        each.shape == (found.measures.model_height, found.measures.model_width, 3) for each in named.values()
    )
    return named


def test_a_control_image_is_resized_as_the_picture_is() -> None:
    expected = np.asarray(Image.fromarray(CONTROL).resize((144, 96), Image.Resampling.LANCZOS))
    for data in (file(CONTROL), upright(CONTROL)):
        assert np.array_equal(made(use(), files=(data,))["control_0"], expected)


def test_a_control_image_is_cut_as_the_picture_is() -> None:
    mask = box(top=70, left=100, bottom=90, right=140)
    found = inspect(file(SCENE), mask, asked(padding_mask_crop=10), card(), LIMITS)
    measures = found.measures
    part = Image.fromarray(np.ascontiguousarray(CONTROL[Box(*present(measures.crop)).window]))
    size = (measures.model_width, measures.model_height)
    expected = np.asarray(part.resize(size, Image.Resampling.LANCZOS))
    assert np.array_equal(made(use(), files=(file(CONTROL),), padding_mask_crop=10)["control_0"], expected)


def test_the_picture_itself_is_annotated_as_the_model_sees_it() -> None:
    mask = box(top=70, left=100, bottom=90, right=140)
    picture = load(inspect(file(SCENE), mask, asked(padding_mask_crop=10), card(), LIMITS).prepared)["image"]
    named = made(use(None, Annotator.CANNY), use(None, Annotator.TILE), padding_mask_crop=10)
    assert np.array_equal(named["control_0"], canny(picture))
    assert np.array_equal(named["control_1"], tile(picture))


def test_each_file_is_decoded_once_and_each_annotation_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    drawn: list[Pixels] = []

    def counted(data: bytes, most: int, field: str) -> Any:
        decoded.append(field)
        return pictures.decode(data, most, field)

    def canny_once(picture: Pixels) -> Pixels:
        drawn.append(picture)
        return canny(picture)

    monkeypatch.setattr(conditions, "decode", counted)
    monkeypatch.setattr(conditions, "ANNOTATORS", {Annotator.CANNY: canny_once})
    named = made(use(1, Annotator.CANNY), use(1), use(1, Annotator.CANNY), files=(b"", file(CONTROL)))
    assert decoded == ["control_image_1"]
    assert len(drawn) == 1
    assert np.array_equal(named["control_0"], named["control_2"])
    assert np.array_equal(named["control_0"], canny(named["control_1"]))


def test_transparency_is_dropped_of_control_images_and_seen_on_white_of_pictures() -> None:
    clear = np.dstack([CONTROL, np.zeros(CONTROL.shape[:2], np.uint8)])
    named = made(use(), use(0, Annotator.TILE), files=(file(clear),))
    assert np.array_equal(named["control_0"], made(use(), files=(file(CONTROL),))["control_0"])
    assert flatten(clear).min() == named["control_1"].min() == 255


def test_without_controlnets_nothing_travels() -> None:
    assert inspect(file(SCENE), None, asked(), card(), LIMITS).controls is None


@given(
    width=st.integers(8, 60), height=st.integers(8, 60), times=st.integers(1, 4), left=st.integers(0, 7),
    top=st.integers(0, 7), wide=st.integers(1, 60), high=st.integers(1, 60),
)  # fmt: skip
def test_a_part_of_a_larger_copy_holds_the_same_pixels(
    width: int, height: int, times: int, left: int, top: int, wide: int, high: int
) -> None:
    """Each pixel of the copy tells which pixel of the picture it is of."""
    rows, columns = np.indices((height, width), np.uint8)
    picture = np.dstack([rows, columns, rows])
    copy = picture.repeat(times, axis=0).repeat(times, axis=1)
    crop = Box(left, top, min(wide, width - left), min(high, height - top))
    part = Size(crop.width * times, crop.height * times)
    view = ModelCrop(Size(width, height), crop, part)
    expected = picture[crop.window].repeat(times, axis=0).repeat(times, axis=1)
    assert np.array_equal(crop_control(copy, view, 0), expected)


@given(
    picture=st.tuples(st.integers(1, 500), st.integers(1, 500)),
    other=st.tuples(st.integers(1, 500), st.integers(1, 500)),
    ends=st.tuples(*[st.floats(0, 1)] * 4),
)
def test_a_scaled_part_lies_within_and_ends_at_the_nearest_edges(
    picture: tuple[int, int], other: tuple[int, int], ends: tuple[float, ...]
) -> None:
    spans = []
    for length, one, two in ((picture[0], *ends[:2]), (picture[1], *ends[2:])):
        first, last = sorted((int(one * (length - 1)), int(two * (length - 1))))
        spans.append((first, last + 1))
    (left, right), (top, bottom) = spans
    found = scale_part(Box(left, top, right - left, bottom - top), Size(*picture), Size(*other))
    for (first, last), (start, length), own, whole in zip(
        spans, ((found.left, found.width), (found.top, found.height)), picture, other, strict=True
    ):
        assert 0 <= start < start + length <= whole
        assert abs(start - first * whole / own) <= 1
        assert abs(start + length - last * whole / own) <= 1.5


GENERATION = ModelCrop(Size(144, 96), None, Size(144, 96))
EDIT = ModelCrop(Size(240, 160), None, Size(144, 96), np.zeros((96, 144, 3), np.uint8))


@pytest.mark.parametrize(
    ("files", "asks", "view", "code", "field"),
    [
        ((b"GIF89a",), use(), EDIT, "unsupported_image_format", "control_image_0"),
        ((file(CONTROL), file(CONTROL)[:-40]), use(1), EDIT, "image_unreadable", "control_image_1"),
        ((file(np.zeros((1100, 1000, 3), np.uint8)),), use(), EDIT, "too_many_pixels", "control_image_0"),
        ((file(CONTROL[:, :200]),), use(), EDIT, "size_mismatch", "control_image_0"),
        ((file(CONTROL[:120]),), use(), GENERATION, "size_mismatch", "control_image_0"),
        ((file(CONTROL),), use(1), EDIT, "invalid_field", "controlnets"),
        ((), use(None, Annotator.CANNY), GENERATION, "invalid_field", "controlnets"),
    ],
)
def test_what_cannot_be_a_control_image_is_refused_by_name(
    files: tuple[bytes, ...], asks: ControlUse, view: ModelCrop, code: str, field: str
) -> None:
    with pytest.raises(GiornataError) as raised:
        control_images(files, (asks,), view, MOST)
    assert (raised.value.code, raised.value.field) == (code, field)


def test_another_aspect_ratio_names_both_sizes() -> None:
    with pytest.raises(SizeMismatch, match=r"Received: 200x160\. Accepted: 240x160") as raised:
        control_images((file(CONTROL[:, :200]),), (use(),), EDIT, MOST)
    assert raised.value.status == 400


# What annotators draw of pictures.


Picture = np.ndarray[Any, np.dtype[np.uint8]]


@st.composite
def drawn_pictures(draw: st.DrawFn) -> Picture:
    """Smooth noise, with steps."""
    height, width = (draw(st.integers(2, 6)) * 8 for _ in range(2))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    noise = gaussian_filter(
        random.uniform(-600, 900, (height, width, 3)), (draw(st.floats(0.5, 4)),) * 2 + (0,)
    )
    noise[: height // 2] += draw(st.integers(0, 200))
    clipped: Picture = noise.clip(0, 255).astype(np.uint8)
    return clipped


def step(low: int, high: int, channels: tuple[int, ...] = (0, 1, 2)) -> Picture:
    """64 x 64 pixels; from column 32 on `channels` are `high`."""
    pixels = np.full((64, 64, 3), low, np.uint8)
    for channel in channels:
        pixels[:, 32:, channel] = high
    return pixels


@pytest.mark.parametrize("annotator", Annotator)
@given(picture=drawn_pictures())
def test_a_picture_becomes_one_of_its_size_always_the_same(annotator: Annotator, picture: Picture) -> None:
    before = picture.copy()
    made = ANNOTATORS[annotator](picture)
    assert made.shape == picture.shape
    assert made.dtype == np.uint8
    assert np.array_equal(picture, before)
    assert np.array_equal(made, ANNOTATORS[annotator](picture))
    plain = np.full_like(picture, 90)
    assert np.array_equal(ANNOTATORS[annotator](plain), plain if annotator is Annotator.TILE else 0 * plain)


def gradients(picture: Picture) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Sobel's, by hand; 0 on the border."""
    from PIL import Image  # noqa: PLC0415 - of this oracle alone

    grey = np.asarray(Image.fromarray(picture).convert("L")).astype(float)
    found = np.zeros(grey.shape)
    for y in range(1, grey.shape[0] - 1):
        for x in range(1, grey.shape[1] - 1):
            near = grey[y - 1 : y + 2, x - 1 : x + 2]
            across = (near[:, 2] - near[:, 0]) @ [1, 2, 1]
            down = (near[2] - near[0]) @ [1, 2, 1]
            found[y, x] = np.hypot(across, down)
    return found


@given(picture=drawn_pictures())
def test_each_line_of_canny_is_steep_and_somewhere_steeper(picture: Picture) -> None:
    edges, steep = canny(picture)[..., 0], gradients(picture)
    assert set(np.unique(edges)) <= {0, 255}
    assert (steep[edges > 0] >= CANNY_LOW - 0.1).all()
    lines, count = label(edges > 0, np.ones((3, 3)))
    # of a line's pixels that were thinned away, none is lost by hysteresis: the steepest one kept counts
    assert all(steep[lines == line].max() >= CANNY_HIGH - 0.1 for line in range(1, count + 1))


@pytest.mark.parametrize(("height", "seen"), [(20, False), (51, True), (255, True)])
def test_canny_draws_a_line_along_a_step_of_enough_height(height: int, seen: bool) -> None:
    """Two pixels wide, since both beside a sharp step are as steep."""
    edges = canny(step(0, height))[1:-1, :, 0]
    expected = np.zeros_like(edges)
    expected[:, [31, 32]] = 255 if seen else 0
    assert np.array_equal(edges, expected)


@pytest.mark.parametrize("channels", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("height", [10, 60, 120])
def test_a_soft_edge_is_twice_as_high_as_the_step_of_any_colour(
    height: int, channels: tuple[int, ...]
) -> None:
    edges = soft_edge(step(40, 40 + height, channels))[32, :, 0].astype(int)
    assert abs(edges.max() - 2 * height) <= 0.06 * 2 * height + 1
    assert set(np.flatnonzero(edges == edges.max())) == {31, 32}
    assert edges[:24].max() == edges[40:].max() == 0
    assert (np.diff(edges[:32]) >= 0).all()


def test_soft_edges_are_cut_at_white() -> None:
    assert soft_edge(step(0, 255)).max() == 255


@given(picture=drawn_pictures())
def test_a_tile_keeps_averages_and_loses_what_is_finer(picture: Picture) -> None:
    height, width, _ = picture.shape
    squares = picture.reshape(height // 8, 8, width // 8, 8, 3).mean(axis=(1, 3))
    fine = np.indices(picture.shape[:2]).sum(axis=0)[..., None] % 2
    board = np.where(fine, 255, 0).astype(np.uint8).repeat(3, axis=2)
    assert np.ptp(tile(board)) <= 1
    flat = np.repeat(np.repeat(squares, 8, axis=0), 8, axis=1).round().astype(np.uint8)
    worst = 1.0  # averages may be rounded apart; then each direction's negative lobes, and its rounding
    for _ in range(2):
        worst = worst * 1.3 + 1
    assert np.abs(tile(flat).astype(int) - tile(picture)).max() <= worst
