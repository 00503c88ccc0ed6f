"""Distances between pictures, against brute force, scikit-image, scipy and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from giornata_lab.quality.metrics import (
    PSNR_CEILING_DB,
    Pixels,
    SeamGradients,
    psnr_db,
    seam,
    together,
)
from giornata_tools.lora_profiler.profiler import ssim

PICTURES = arrays.arrays(np.uint8, (6, 7, 3))
MASKS = arrays.arrays(np.bool_, (6, 7))


def random_picture(seed: int, side: int = 32) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def test_psnr_equals_scikit_image() -> None:
    one, other = random_picture(0), random_picture(1)
    assert psnr_db(one, other) == pytest.approx(peak_signal_noise_ratio(one, other))


def test_psnr_looks_at_the_mask_alone() -> None:
    one = random_picture(0)
    other = one.copy()
    other[:, 16:] = 255 - other[:, 16:]
    left = np.zeros((32, 32), bool)
    left[:, :16] = True
    assert psnr_db(one, other, left) == PSNR_CEILING_DB
    assert psnr_db(one, other, ~left) == pytest.approx(peak_signal_noise_ratio(one[:, 16:], other[:, 16:]))


def test_ssim_is_scikit_images_over_the_whole_and_the_mean_of_its_map_in_a_mask() -> None:
    one, other = random_picture(0), random_picture(1)
    mask = np.zeros((32, 32), bool)
    mask[4:20, 6:30] = True
    mean, every = structural_similarity(one, other, channel_axis=2, full=True)
    assert ssim(one, other) == pytest.approx(mean)
    assert ssim(one, other, mask) == pytest.approx(every[mask].mean())
    assert ssim(one, one, mask) == pytest.approx(1)


def brute_force(picture: Pixels, mask: NDArray[np.bool_]) -> tuple[float, int]:
    total, pairs = 0.0, 0
    for y in range(6):
        for x in range(7):
            for v, u in ((y + 1, x), (y, x + 1)):
                if v < 6 and u < 7 and mask[y, x] != mask[v, u]:
                    pairs += 1
                    total += sum(abs(int(picture[y, x, c]) - int(picture[v, u, c])) for c in range(3)) / 765
    return total, pairs


@given(PICTURES, PICTURES, MASKS)
def test_a_seam_is_every_pair_of_neighbours_of_which_one_is_masked(
    edit: Pixels, truth: Pixels, mask: NDArray[np.bool_]
) -> None:
    found = seam(edit, truth, mask)
    expected, pairs = brute_force(edit, mask)
    assert found.pairs == pairs
    assert found.edit == pytest.approx(expected)
    assert found.truth == pytest.approx(brute_force(truth, mask)[0])


def test_seams_are_put_together_as_a_ratio_of_means_not_a_mean_of_ratios() -> None:
    both = together([SeamGradients(1.0, 2.0, 10), SeamGradients(9.0, 3.0, 30)])
    assert both == SeamGradients(10.0, 5.0, 40)
    assert both.ratio == 2
