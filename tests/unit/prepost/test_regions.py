"""Regions of what a segmenter saw: threshold, connected pieces, least area, the best ones, and their masks."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image
from skimage import measure

from giornata.wire.errors import NothingFound, TooManyPixels, UnsupportedImageFormat
from giornata_prepost import segmentation
from giornata_prepost.images.masks import bounds
from giornata_prepost.images.pictures import Size, decode
from giornata_prepost.segmentation import (
    SAME_IOU,
    Detection,
    Heat,
    HeatMap,
    RegionCriteria,
    best_score,
    box_iou,
    connected_regions,
    decode_for_segmenter,
    region_masks,
    suppress_overlaps,
)

HEATS = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 24), st.integers(1, 24)),
    elements=st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]),
)
THRESHOLDS = st.sampled_from([0.1, 0.2, 0.5, 0.7, 1.0])
BOXES = st.tuples(*[st.integers(-2, 10).map(lambda eighth: eighth / 8)] * 4).map(
    lambda box: (min(box[0], box[2]), min(box[1], box[3]), max(box[0], box[2]), max(box[1], box[3]))
)
CANDIDATES = st.lists(st.builds(Detection, st.floats(0, 1), BOXES, st.none()), max_size=12).map(tuple)


def two_hats() -> Heat:
    """One at the left, surer than one at the right, and a speck."""
    heat = np.full((64, 128), 0.1, np.float32)
    heat[10:30, 8:40] = 0.9
    heat[40:60, 70:120] = 0.7
    heat[5, 125] = 0.95
    return heat


def shown(png: bytes) -> Any:
    return np.asarray(Image.open(BytesIO(png)))


@given(HEATS, THRESHOLDS, st.integers(1, 5))
def test_pieces_are_those_that_another_library_finds(heat: Heat, threshold: float, most: int) -> None:
    found = connected_regions(HeatMap(heat), Size.of(heat), RegionCriteria(threshold, most))
    labels, count = measure.label(heat >= np.float32(threshold), connectivity=2, return_num=True)
    peaks = sorted((float(heat[labels == number].max()) for number in range(1, count + 1)), reverse=True)
    assert [piece.score for piece in found] == pytest.approx(peaks[:most])
    for piece in found:
        (number,) = np.unique(labels[piece.mask])
        assert np.array_equal(piece.mask, labels == number)


@given(HEATS, THRESHOLDS)
def test_a_region_is_found_up_to_its_score_and_not_above(heat: Heat, threshold: float) -> None:
    size = Size.of(heat)
    for piece in connected_regions(HeatMap(heat), size, RegionCriteria(threshold, 9)):
        assert threshold <= piece.score + 1e-6
        assert connected_regions(HeatMap(heat), size, RegionCriteria(piece.score, 99))
    above = best_score(HeatMap(heat)) + 0.01
    assert connected_regions(HeatMap(heat), size, RegionCriteria(above, 9)) == []


@given(CANDIDATES, THRESHOLDS, st.integers(1, 5))
def test_of_boxes_that_show_one_thing_the_best_is_taken(
    candidates: tuple[Detection, ...], threshold: float, most: int
) -> None:
    taken = suppress_overlaps(candidates, RegionCriteria(threshold, most))
    assert len(taken) <= most
    assert all(one.score >= threshold for one in taken)
    assert [one.score for one in taken] == sorted((one.score for one in taken), reverse=True)
    for index, one in enumerate(taken):
        assert all(box_iou(one.box, other.box) <= SAME_IOU for other in taken[:index])
    if len(taken) < most:
        for left in set(candidates) - set(taken):
            surer = [one for one in taken if one.score >= left.score]
            assert left.score < threshold or any(box_iou(left.box, one.box) > SAME_IOU for one in surer)


@given(CANDIDATES, st.integers(1, 40), st.integers(1, 40))
def test_the_region_of_a_box_holds_every_pixel_that_it_touches(
    candidates: tuple[Detection, ...], height: int, width: int
) -> None:
    for piece in connected_regions(candidates, Size(width, height), RegionCriteria(0.1, 20)):
        ys, xs = np.nonzero(piece.mask)
        boxes = [one.box for one in candidates if one.score == piece.score]
        covers = [
            (
                (xs + 1 > left * width)
                & (xs < right * width)
                & (ys + 1 > top * height)
                & (ys < bottom * height)
            ).all()
            for left, top, right, bottom in boxes
        ]
        assert any(covers)
        assert piece.mask.sum() == (np.ptp(ys) + 1) * (np.ptp(xs) + 1)


@pytest.mark.parametrize("scale", [1, 3])
def test_masks_have_the_pictures_size_and_are_those_of_their_regions(scale: int) -> None:
    heat = two_hats()
    size = Size(128 * scale, 64 * scale)
    masks = region_masks(HeatMap(heat), size, RegionCriteria(0.5, 16, each=True), "hats")
    assert [round(one.score, 2) for one in masks.regions] == [0.9, 0.7]
    whole = shown(masks.png)
    assert whole.shape == (size.height, size.width)
    each = [shown(one.png or b"") for one in masks.regions]
    assert np.array_equal(whole, each[0] | each[1])
    for region, mask in zip(masks.regions, each, strict=True):
        left, top, width, height = region.box
        assert region.area == mask.sum()
        assert mask[region.box.window].sum() == region.area
        assert mask[top].any()
        assert mask[:, left].any()
        assert mask[top + height - 1].any()
        assert mask[:, left + width - 1].any()
    assert masks.regions[0].box.left == pytest.approx(8 * scale, abs=scale)


def test_a_mask_is_read_back_as_an_edit_reads_one() -> None:
    masks = region_masks(HeatMap(two_hats()), Size(128, 64), RegionCriteria(0.5, 1), "a hat")
    pixels = decode(masks.png, 10_000, "mask").pixels
    assert set(np.unique(pixels)) == {0, 255}
    assert np.array_equal(pixels[..., 0] == 255, two_hats() == np.float32(0.9))


def test_own_masks_are_made_for_who_wants_them() -> None:
    masks = region_masks(HeatMap(two_hats()), Size(128, 64), RegionCriteria(0.5, 16), "hats")
    assert [one.png for one in masks.regions] == [None, None]


def test_specks_are_no_regions() -> None:
    found = connected_regions(HeatMap(two_hats()), Size(128, 64), RegionCriteria(0.94, 16))
    assert found == []


def test_where_nothing_is_found_the_error_says_what_was_looked_for_and_the_best_score() -> None:
    with pytest.raises(NothingFound) as caught:
        region_masks(HeatMap(two_hats() * np.float32(0.4)), Size(128, 64), RegionCriteria(0.5, 16), "the cat")
    assert "the cat" in str(caught.value.received)
    assert "0.380" in str(caught.value.received)
    assert "0.5" in str(caught.value.accepted)
    with pytest.raises(NothingFound, match=r"0\.000"):
        region_masks((), Size(128, 64), RegionCriteria(0.5, 16), "the cat")


def test_an_outline_stays_inside_its_box() -> None:
    heat = np.zeros((64, 64), np.float32)
    heat[:, :48] = 1
    (piece,) = connected_regions(
        (Detection(0.8, (0.5, 0.25, 1.0, 0.75), heat),), Size(64, 64), RegionCriteria(0.5, 4)
    )
    assert piece.mask.sum() == 16 * 32
    assert piece.mask[16:48, 32:48].all()


@given(HEATS, st.integers(0, 30), st.integers(0, 30))
def test_a_region_is_told_as_its_whole_mask_would_be(heat: Heat, wider: int, higher: int) -> None:
    size = Size(heat.shape[1] + wider, heat.shape[0] + higher)
    with pytest.MonkeyPatch.context() as patched:  # found in fewer pixels than the picture has
        patched.setattr(segmentation, "WORK_PIXELS", heat.size)
        try:
            masks = region_masks(HeatMap(heat), size, RegionCriteria(0.5, 1 << 10, each=True), "hats")
        except NothingFound:
            return
    wholes = [shown(one.png or b"") for one in masks.regions]
    for one, whole in zip(masks.regions, wholes, strict=True):
        assert (one.box, one.area) == (bounds(whole, 0), int(np.count_nonzero(whole)))
    assert np.array_equal(np.logical_or.reduce(wholes), shown(masks.png))
    assert sum(one.area for one in masks.regions) == np.count_nonzero(shown(masks.png)), "none overlap"


def test_a_large_picture_is_cut_out_in_fewer_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmentation, "WORK_PIXELS", 32 * 64)
    masks = region_masks(HeatMap(two_hats()), Size(256, 128), RegionCriteria(0.5, 16), "hats")
    whole = shown(masks.png)
    assert whole.shape == (128, 256)
    truth = np.kron(two_hats() >= np.float32(0.5), np.ones((2, 2), np.bool_))
    assert (whole & truth).sum() / (whole | truth).sum() > 0.9


def test_a_segmenter_looks_at_an_upright_opaque_picture_of_bounded_size() -> None:
    clear = np.zeros((40, 90, 4), np.uint8)
    target = BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(clear).save(target, "PNG", exif=exif)
    picture, size = decode_for_segmenter(target.getvalue(), 4000, 900)
    assert size == Size(40, 90)
    assert picture.shape == (45, 20, 3)
    assert (picture == 255).all()


def test_hostile_pictures_are_refused() -> None:
    with pytest.raises(UnsupportedImageFormat):
        decode_for_segmenter(b"GIF89a", 4000, 900)
    target = BytesIO()
    Image.new("L", (100, 100)).save(target, "PNG")
    with pytest.raises(TooManyPixels):
        decode_for_segmenter(target.getvalue(), 9999, 900)
