"""A run's pictures on disk, lossless, with what made them beside them; a later run is compared with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image
from pydantic import BaseModel, ValidationError

from giornata_lab.quality.cases import QualityCase, digest
from giornata_lab.quality.metrics import Pixels
from giornata_lab.quality.report import QualityRun
from giornata_tools.launcher.process import LaunchError

MANIFEST: Final = "run.json"


class QualityManifest(BaseModel):
    """``run.json`` in a folder of pictures."""

    run: QualityRun
    edits: dict[str, str]
    """Name of each edit, and of its file without the ending, → digest of its case."""


class EarlierQualityRun(BaseModel):
    """What an earlier run left."""

    folder: Path
    manifest: QualityManifest

    def check(self, cases: Sequence[QualityCase]) -> None:
        """Return whether these can be compared with it, before hours go into making them.

        Raises:
            LaunchError: a scene was another one, a file cannot be read, or there is none of them.
        """
        if all([self.picture(case) is None for case in cases]):  # noqa: C419 - every one is looked at
            raise LaunchError(f"{self.folder} holds none of this run's {len(cases)} edits.")

    def picture(self, case: QualityCase) -> Pixels | None:
        """(height, width, 3) the earlier edit of `case`, or None where that run did not make it.

        Raises:
            LaunchError: the scene of that name was another one, or the file is gone.
        """
        name = case.slot.name
        if name not in self.manifest.edits:
            return None
        theirs, ours = self.manifest.edits[name], digest([case])
        if theirs != ours:
            raise LaunchError(
                f"{self.folder} was made with other scenes: {name} was {theirs}, is {ours}. Make it again."
            )
        try:
            return np.asarray(Image.open(self.folder / f"{name}.png").convert("RGB"))
        except OSError as error:
            raise LaunchError(f"{self.folder / name}.png cannot be read: {error}.") from error


def empty(folder: Path) -> None:
    """Make the folder, and remove an earlier run's pictures from it and nothing else.

    Raises:
        LaunchError: something else in it is called `MANIFEST`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        for name in earlier(folder).manifest.edits:
            (folder / f"{name}.png").unlink(missing_ok=True)
        (folder / MANIFEST).unlink()


def save(folder: Path, case: QualityCase, edit: Pixels) -> None:
    """Write one edit into the folder."""
    Image.fromarray(edit).save(folder / f"{case.slot.name}.png")


def conclude(folder: Path, run: QualityRun, cases: list[QualityCase]) -> None:
    """Write what made the pictures: from now on they can be compared with."""
    manifest = QualityManifest(run=run, edits={case.slot.name: digest([case]) for case in cases})
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def earlier(folder: Path) -> EarlierQualityRun:
    """The run that wrote `folder`.

    Raises:
        LaunchError: none did, or none to its end.
    """
    path = folder / MANIFEST
    try:
        manifest = QualityManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise LaunchError(f"{folder} holds no finished run: {MANIFEST} is missing.") from None
    except ValidationError as error:
        raise LaunchError(f"{path} is not what a run writes: {error}") from error
    return EarlierQualityRun(folder=folder, manifest=manifest)
