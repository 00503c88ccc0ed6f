"""What an inspection says of the output."""

from __future__ import annotations

import pytest

from giornata.wire.jobs import Box
from tests.contract.messages import INSPECTION


@pytest.mark.parametrize(
    ("crop", "output", "box"),
    [
        (None, (64, 48), (0, 0, 64, 48)),
        (None, (640, 480), (0, 0, 640, 480)),
        ((8, 4, 48, 40), (64, 48), (8, 4, 48, 40)),
        ((8, 4, 48, 40), (128, 96), (16, 8, 96, 80)),
        ((9, 5, 3, 3), (32, 24), (4, 2, 2, 2)),
        ((1, 1, 1, 1), (6, 4), (0, 0, 1, 1)),
    ],
)
def test_the_box_that_is_painted_is_in_pixels_of_the_output(
    crop: Box | None, output: tuple[int, int], box: Box
) -> None:
    changes = {"crop": crop, "output_width": output[0], "output_height": output[1]}
    assert INSPECTION.model_copy(update=changes).painted_box == box
