"""A disk of a few megabytes that a test fills and frees."""

from __future__ import annotations

import errno
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Leave no byte free."""
        with self._ballast.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        """Give back what was filled."""
        self._ballast.unlink()


@contextmanager
def small_disk(size_mb: int = 32) -> Iterator[SmallDisk]:
    """A disk in memory; the test is skipped where none can be mounted, which takes root and its capabilities."""
    folder = Path(tempfile.mkdtemp(prefix="gio-disk-"))
    mount = shutil.which("mount")
    try:
        done = mount and subprocess.run(
            [mount, "-t", "tmpfs", "-o", f"size={size_mb}m", "giornata-test", folder],
            capture_output=True,
            text=True,
            check=False,
        )
        if not done or done.returncode:
            pytest.skip(f"no disk can be mounted here: {done.stderr.strip() if done else 'mount is missing'}")
        try:
            yield SmallDisk(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)  # noqa: S607 - as `mount`
    finally:
        folder.rmdir()
