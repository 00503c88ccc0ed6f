"""What a file is, within the store's limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from giornata_lora_store.header_reading import read_header
from giornata_lora_store.rules.headers import LoraHeader, LoraSizeLimits, recognised


@dataclass(frozen=True)
class LoraHeaderInspector:
    """Reads headers; no tensor is read."""

    limits: LoraSizeLimits
    header_bytes: int

    def inspect(self, path: Path) -> LoraHeader:
        """What the header of a file says; raises as :func:`read_header` and :func:`recognised`. Blocking."""
        return recognised(read_header(path, self.header_bytes, self.limits.tensors), self.limits)
