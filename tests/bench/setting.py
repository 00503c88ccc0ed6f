"""How the benchmarks reuse: one setting for speed, bytes and pictures, the product's own defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from giornata.requests import EditParameters
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.reuse.template import Form

FORM, BITS, LEVELS = (
    DenoiserConfig.model_fields[f"template_{name}"].default for name in ("form", "bits", "levels")
)
HALO: Final = EditParameters.model_fields["halo"].default


@dataclass(frozen=True)
class Setting:
    """One way to reuse."""

    form: Form = FORM
    bits: int = BITS
    levels: int = LEVELS
    """Recorded noise levels; 0 for the edit's own."""
    halo: int = HALO

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"form": str(self.form), "bits": self.bits, "levels": self.levels, "halo": self.halo}


DEFAULT: Final = Setting()
