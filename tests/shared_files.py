"""Folders that all tests of a run read, such as checkpoints: the first worker that needs one makes it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from giornata.scratch import exclusive_lock


class SharedFolders:
    """Folders below `root`, by name. A test that changes files of one copies it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._found: dict[Path, dict[Path, tuple[int, int]]] = {}

    def folder(self, name: str, make: Callable[[Path], object]) -> Path:
        """The folder `name`, whose content `make` writes into the folder that it is given.

        Other workers wait meanwhile. What a worker leaves that is killed there, the next one does not find.
        """
        folder, making = self._root / name, self._root / ".making" / name
        if folder not in self._found:
            making.mkdir(parents=True, exist_ok=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            with exclusive_lock(making):
                if not folder.exists():
                    part = making / "part"
                    shutil.rmtree(part, ignore_errors=True)
                    part.mkdir()
                    make(part)
                    part.rename(folder)
            self._found[folder] = _files(folder)
        return folder

    def check(self) -> None:
        """Raise an error if a test has changed, added or removed a file."""
        for folder, files in self._found.items():
            changed = {path for path, _ in _files(folder).items() ^ files.items()}
            assert not changed, (
                f"A test has changed files that others read, too: {sorted(map(str, changed))}."
            )


def shared_root(base: Path) -> Path:
    """A folder for all workers of the run whose worker keeps its temporary files in `base`."""
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"


def _files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Time of the last change and size of each file."""
    found = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {path: (stat.st_mtime_ns, stat.st_size) for path, stat in found.items()}
