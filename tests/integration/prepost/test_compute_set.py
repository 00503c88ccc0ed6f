"""The bitmap that an inspection carries equals what the model's own mask says of every token."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load

from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters
from giornata_prepost.families.pipeline import ImageModel
from giornata_prepost.images.pictures import Pixels
from giornata_prepost.images.stages import PixelLimits, inspect

LIMITS = PixelLimits(max_pixels=100_000, budget_pixels=96 * 96)
SCENE = np.random.default_rng(2).integers(0, 256, (120, 168, 3), np.uint8)


def _file(pixels: Pixels) -> bytes:
    target = BytesIO()
    Image.fromarray(pixels).save(target, "PNG")
    return target.getvalue()


@given(
    marked=st.tuples(st.integers(0, 119), st.integers(0, 167), st.integers(1, 120), st.integers(1, 168)),
    grow=st.integers(0, 12),
    blur=st.floats(0, 4),
    crop=st.none() | st.integers(0, 60),
    halo=st.integers(0, 3),
)
def test_the_compute_set_is_what_the_conditioning_mask_touches_and_the_halo(
    model: ImageModel,
    card: ModelCard,
    marked: tuple[int, int, int, int],
    grow: int,
    blur: float,
    crop: int | None,
    halo: int,
) -> None:
    top, left, height, width = marked
    mask = np.zeros(SCENE.shape[:2], np.uint8)
    mask[top : top + height, left : left + width] = 255
    asked = EditParameters(prompt="a hat", grow_mask=grow, mask_blur=blur, padding_mask_crop=crop, halo=halo)
    found = inspect(_file(SCENE), _file(mask), asked, card.model_copy(update={"native_size": 96}), LIMITS)
    prepared = load(found.prepared)
    (row,) = model.encode_rows(prepared["image"], prepared["mask"], (0,))
    grid = (
        found.measures.model_height // card.pixel_multiple,
        found.measures.model_width // card.pixel_multiple,
    )
    touched = (row["mask"].amax(dim=1) > 0).view(grid)
    assert found.measures.compute_tokens == int(touched.sum())
    grown = F.max_pool2d(touched.float()[None], 2 * halo + 1, stride=1, padding=halo)[0] > 0
    if bool(grown.all()):
        assert found.measures.compute_set is None
        return
    assert found.measures.compute_set is not None
    cells = found.measures.compute_set[1]
    bits = np.unpackbits(np.frombuffer(cells.bits, np.uint8), count=cells.height * cells.width)
    torch.testing.assert_close(torch.from_numpy(bits.reshape(cells.height, cells.width)).bool(), grown)
    assert cells.count == int(grown.sum())
