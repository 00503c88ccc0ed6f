"""The demo's hand-drawn mask."""

from __future__ import annotations

import numpy as np
from scipy.ndimage import label

from deploy.launcher.shape import HELMET, paint, smooth


def test_the_spline_runs_through_every_point() -> None:
    curve = smooth(HELMET, per_segment=4)
    assert len(curve) == 4 * len(HELMET)
    np.testing.assert_allclose(curve[::4], HELMET, atol=1e-12)


def test_the_spline_of_points_on_a_circle_stays_near_the_circle() -> None:
    angles = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    curve = np.array(smooth([(float(np.cos(a)), float(np.sin(a))) for a in angles]))
    np.testing.assert_allclose(np.hypot(*curve.T), 1, atol=0.005)


def test_the_mask_is_one_blob_and_no_box() -> None:
    mask = np.asarray(paint(512, 512)) > 0
    _, blobs = label(mask)
    assert blobs == 1
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    box = (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
    assert 0.5 < mask.sum() / box < 0.9
    assert 0.08 < mask.mean() < 0.13, "about the mean mask ratio of production, 0.11"


def test_the_mask_scales_with_the_picture() -> None:
    small, large = paint(128, 96), paint(512, 384)
    assert small.size == (128, 96)
    assert small.mode == "L"
    assert abs(np.asarray(small).mean() - np.asarray(large).mean()) < 5
