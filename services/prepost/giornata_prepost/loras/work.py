"""The process in which LoRAs are read. It starts with the first one, and only it loads torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from giornata.wire.errors import GiornataError, LoraTooLarge, LoraUnreadable
from giornata_prepost.work import WorkPool

if TYPE_CHECKING:
    from giornata_prepost.loras.normalising import CanonicalLoraSummary


class LoraPool(WorkPool):
    """One process. A LoRA that keeps it busy for too long, or ends it, is refused."""

    def __init__(self) -> None:
        super().__init__(1)

    def late(self, limit_s: float) -> GiornataError:
        """The file costs too much."""
        return LoraTooLarge("Reading the LoRA takes too long.", received=f"more than {limit_s:g} s")

    def deadly(self) -> GiornataError:
        """The file's bytes crash what reads them."""
        return LoraUnreadable("Reading the LoRA ends the process that does it.")


def normalised(source: Path, target: Path, folder: Path, told: Mapping[str, str]) -> CanonicalLoraSummary:
    """As :func:`giornata_prepost.loras.normalising.normalise`."""
    from giornata_prepost.loras.normalising import normalise  # noqa: PLC0415 - imports torch and diffusers

    return normalise(source, target, folder, told)
