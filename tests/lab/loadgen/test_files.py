"""Masks and pictures that the load generator sends."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage

from giornata.wire.requests import MaskMode
from giornata_lab.loadgen.pictures import generated, made, mask, mask_file, material
from giornata_lab.loadgen.pictures import given as templates_of
from giornata_lab.loadgen.workload import MaskShape, Workload, draw, zipf
from giornata_prepost.images.masks import edited_region
from giornata_prepost.images.pictures import decode
from giornata_tools.lora_profiler.probes import upright_size

sides = st.integers(16, 200)


@given(
    width=sides,
    height=sides,
    ratio=st.floats(0, 1),
    shape=st.sampled_from(MaskShape),
    seed=st.integers(0, 2**31 - 1),
)
def test_a_mask_is_one_patch_of_its_ratio(
    width: int, height: int, ratio: float, shape: MaskShape, seed: int
) -> None:
    marked = mask(width, height, ratio, shape, seed)
    assert marked.shape == (height, width)
    assert int(marked.sum()) == max(1, round(ratio * width * height))
    _, patches = ndimage.label(marked, structure=np.ones((3, 3)))
    assert patches == 1


@given(ratio=st.floats(0.02, 0.4), seed=st.integers(0, 2**31 - 1))
def test_a_square_is_as_wide_as_high(ratio: float, seed: int) -> None:
    rows, columns = np.nonzero(mask(128, 128, ratio, MaskShape.SQUARE, seed))
    assert abs(int(np.ptp(rows)) - int(np.ptp(columns))) <= 1


def test_masks_lie_at_other_places_and_equal_seeds_at_the_same() -> None:
    masks = [mask(64, 64, 0.1, MaskShape.BLOB, seed) for seed in (1, 1, 2)]
    assert np.array_equal(masks[0], masks[1])
    assert not np.array_equal(masks[0], masks[2])


def test_a_mask_file_marks_for_the_system_what_was_asked_for() -> None:
    marked = mask(48, 32, 0.2, MaskShape.BLOB, seed=3)
    picture = np.zeros((32, 48, 3), np.uint8)
    read = decode(mask_file(marked), 48 * 32, "mask").pixels
    assert np.array_equal(edited_region(picture, read, MaskMode.AUTO), marked)


def test_generated_pictures_differ_and_have_their_size() -> None:
    first, again, other = (generated(40, 24, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert upright_size(first) == (40, 24)


def test_a_picture_is_as_wide_as_it_is_shown() -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    Image.new("RGB", (30, 20)).save(file, "JPEG", exif=exif)
    [template] = templates_of([file.getvalue()]).values()
    assert (template.width, template.height) == (20, 30)


def test_what_is_no_picture_is_told_by_its_number() -> None:
    with pytest.raises(ValueError, match="picture 1: it is no picture"):
        templates_of([generated(16, 16, 0), b"text"])


def test_there_are_files_for_every_request_and_no_others() -> None:
    workload = Workload((0.1, 0.3), None, {1: 1.0}, zipf(50, 1.0), MaskShape.BLOB)
    requests = draw([0.0, 1.0, 2.0], workload, seed=0)
    files = material(requests, made(requests, 32, 48, seed=0))
    assert files.templates.keys() == {request.template for request in requests}
    assert files.masks.keys() == set(requests)
    sizes = {Image.open(io.BytesIO(file)).size for file in files.masks.values()}
    assert sizes == {(32, 48)}
