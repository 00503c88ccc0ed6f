"""How references are decoded and sized."""

from __future__ import annotations

import io

import numpy as np
import pytest
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import VAE_IMAGE_SIZE, calculate_dimensions
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load

from giornata.families import Family
from giornata.wire.errors import GiornataError
from giornata_prepost.images.conditions import MAX_PIXELS, cropped, of_edit_plus, of_kontext, prepare
from giornata_prepost.images.geometry import Size
from tests.fakes.fleet import CARD

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
    for name, data, box in (
        ("reference_0", files[0], (3, 2, 67, 98)),
        ("reference_1", files[1], (0, 0, 32, 16)),
    ):
        assert np.array_equal(kept[name], np.asarray(Image.open(io.BytesIO(data)).crop(box)))


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
