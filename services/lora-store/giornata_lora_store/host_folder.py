"""The folder of a host tier: whole files by their sha-256, filled by one store. Blocking.

A file appears by renaming, once it is whole, and is never written again. The file :data:`TIER_NAME` tells the denoisers
of the machine which tier it is.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import Final

from giornata.lora_transfer import TIER_NAME, WHOLE_FILES
from giornata.wire.errors import Failed

PART: Final = ".part"
"""Ends the names of files that are being copied."""
DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class HostFolder:
    """A folder that this process alone fills; it is made.

    Raises:
        Failed: another process fills it, or it cannot be written.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._files = folder / WHOLE_FILES
        try:
            self._files.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            marker = folder / f"{TIER_NAME}{PART}"
            marker.write_text(name, encoding="utf-8")
            marker.replace(folder / TIER_NAME)
            for path in self._files.glob(f"*{PART}"):
                path.unlink(missing_ok=True)
        except BlockingIOError as error:
            raise Failed(
                "The host tier's folder is filled by another LoRA store.",
                received=folder,
                accepted="a folder of its own",
            ) from error
        except OSError as error:
            raise Failed(f"The host tier's folder cannot be used: {error}", received=folder) from error

    def close(self) -> None:
        """Let another process fill it."""
        os.close(self._lock)

    def found(self) -> list[tuple[str, int]]:
        """Digest and bytes of each file that an earlier process left, the oldest use first."""
        known = [(path, path.stat()) for path in self._files.iterdir() if DIGEST.fullmatch(path.name)]
        return [(path.name, stat.st_size) for path, stat in sorted(known, key=lambda one: one[1].st_mtime)]

    def part(self, digest: str) -> Path:
        """Where a file is copied to."""
        return self._files / f"{digest}{PART}"

    def appear(self, digest: str) -> None:
        """The part of this digest is whole."""
        self.part(digest).replace(self._files / digest)

    def used(self, digest: str) -> None:
        """Note a use, for the order that a later process finds."""
        os.utime(self._files / digest)

    def remove(self, digest: str) -> None:
        """Let go of a file; readers that have opened it read on."""
        (self._files / digest).unlink(missing_ok=True)
