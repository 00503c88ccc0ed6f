"""Where the project's checkout is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import giornata_tools


def find() -> Path | None:
    """The checkout that this package is installed from in place, else the one around the working directory."""
    return first(places(Path(giornata_tools.__file__), Path.cwd()))


def places(package: Path, folder: Path) -> list[Path]:
    """Where to look: above the file `package` of an installation in place; in `folder` and above it."""
    return [package.parents[3], folder, *folder.parents]


def first(candidates: Iterable[Path]) -> Path | None:
    """The first of `candidates` that is a checkout."""
    return next(
        (path for path in candidates if (path / "deploy" / "tools" / "pyproject.toml").is_file()), None
    )
