"""Pictures for the end-to-end tests, and the OpenAI-style form, as the benches have them."""

from __future__ import annotations

from giornata_lab.bench.systems.edit_forms import (
    Pixels,
    box,
    edit_form,
    file,
    pixels,
    scene,
)

__all__ = ["Pixels", "box", "edit_form", "file", "pixels", "scene"]
