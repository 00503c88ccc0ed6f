"""What a file is, within the store's limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from giornata_lora_store.header_reading import read_header
from giornata_lora_store.rules.headers import Found, Limits, recognised


@dataclass(frozen=True)
class Inspection:
    """Reads headers; no tensor is read."""

    limits: Limits
    header_bytes: int

    def inspect(self, path: Path) -> Found:
        """What the header of a file says; raises as :func:`read_header` and :func:`recognised`. Blocking."""
        return recognised(read_header(path, self.header_bytes, self.limits.tensors), self.limits)
