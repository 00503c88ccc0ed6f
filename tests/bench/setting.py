"""How the benchmarks reuse: one setting for speed, bytes and pictures, which is what the product does unless told otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from giornata.requests import EditParameters
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.reuse.template import Form


def _default(model: Any, field: str) -> Any:
    return model.model_fields[field].default


@dataclass(frozen=True)
class Setting:
    """One way to reuse."""

    form: Form = _default(DenoiserConfig, "template_form")
    bits: int = _default(DenoiserConfig, "template_bits")
    levels: int = _default(DenoiserConfig, "template_levels")
    """Recorded noise levels; 0 for the edit's own."""
    halo: int = _default(EditParameters, "halo")

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"form": str(self.form), "bits": self.bits, "levels": self.levels, "halo": self.halo}


DEFAULT: Final = Setting()
