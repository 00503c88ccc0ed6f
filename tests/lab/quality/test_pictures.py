"""A run's pictures on disk, and what is refused as an earlier run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from giornata_lab.quality import evaluation
from giornata_lab.quality.cases import QualityCase, draw, slots, spread
from giornata_tools.launcher.process import LaunchError
from tests.lab.quality.test_report import RUN


@pytest.fixture(scope="module")
def some() -> list[QualityCase]:
    return [draw(slot) for slot in spread(slots(), 4)]


@pytest.fixture
def folder(tmp_path: Path, some: list[QualityCase]) -> Path:
    """A finished run of three edits."""
    evaluation.empty(tmp_path / "run")
    for case in some[:3]:
        evaluation.save(tmp_path / "run", case, case.scene.after)
    evaluation.conclude(tmp_path / "run", RUN, some[:3])
    return tmp_path / "run"


def test_pictures_come_back_as_they_were(folder: Path, some: list[QualityCase]) -> None:
    earlier = evaluation.earlier_run(folder)
    assert earlier.manifest.run == RUN
    for case in some[:3]:
        picture = earlier.picture(case)
        assert picture is not None
        assert np.array_equal(picture, case.scene.after)


def test_other_scenes_are_refused(folder: Path, some: list[QualityCase]) -> None:
    scene = some[0].scene
    scene.after[0, 0, 0] ^= 1
    try:
        with pytest.raises(LaunchError, match="other scenes"):
            evaluation.earlier_run(folder).picture(some[0])
    finally:
        scene.after[0, 0, 0] ^= 1


def test_a_lost_picture_is_told_by_its_name(folder: Path, some: list[QualityCase]) -> None:
    (folder / f"{some[0].slot.name}.png").unlink()
    with pytest.raises(LaunchError, match=some[0].slot.name):
        evaluation.earlier_run(folder).picture(some[0])


def test_emptying_removes_an_earlier_run_and_nothing_else(folder: Path) -> None:
    (folder / "holiday.png").write_bytes(b"mine")
    evaluation.empty(folder)
    assert [path.name for path in folder.iterdir()] == ["holiday.png"]
