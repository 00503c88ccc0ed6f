"""How the benchmarks reuse: one setting for speed, bytes and pictures, the product's own defaults."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Final

from giornata.wire.requests import EditParameters
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.config import DenoiserConfig, TextReusePolicy
from giornata_denoiser.templates.identity import LEVELS

FORM: Final = DenoiserConfig.model_fields["template_form"].default
BITS: Final = DenoiserConfig.template_bits
CORRECTED: Final = DenoiserConfig.template_correction
KEEPS_PADDING: Final = DenoiserConfig.model_fields["reuse_text"].default is TextReusePolicy.PADDING
HALO: Final = EditParameters.model_fields["halo"].default


class Teacher(StrEnum):
    """Whose correction an edit takes."""

    ITSELF = "its own"
    """It computes its first step in full."""
    SEED = "another seed"
    """An earlier edit of the same picture, mask and prompt."""
    PROMPT = "another prompt"
    """An earlier edit of the same picture and mask."""


@dataclass(frozen=True)
class BenchSetting:
    """One way to reuse."""

    form: CacheForm = FORM
    bits: int = BITS
    levels: int = LEVELS
    """Recorded noise levels; 0 for the edit's own."""
    halo: int = HALO
    corrected: bool = CORRECTED
    """Whether what is taken is corrected by a step that is computed in full."""
    teacher: Teacher = Teacher.ITSELF
    renewed_every: int = 0
    """Without a template: steps from one that is computed in full to the next; 0 takes from a template."""
    keeps_padding: bool = KEEPS_PADDING
    """Whether most steps take their prompts' padding."""

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "form": str(self.form)}

    @property
    def correction_bits(self) -> int | None:
        """As an engine takes it."""
        return self.bits if self.corrected else None


DEFAULT: Final = BenchSetting()
"""How transformers reuse by default."""
