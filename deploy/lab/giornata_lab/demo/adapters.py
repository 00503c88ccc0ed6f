"""What the demo shows of the adapters that ship: one edit without each of them, and the same edit with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from PIL import Image

from giornata.wire.adapters import AskedControl, AskedLora
from giornata.wire.requests import EditParameters
from giornata_lab.demo.exhibits import Exhibit
from giornata_lab.model.adapters import card
from giornata_lab.model.adapters.card import AdapterCard, AdapterKind
from giornata_lab.model.adapters.silhouettes import control_image
from giornata_lab.model.scenes import SceneTask, masks, sample
from giornata_lab.model.scenes.captions import plain
from giornata_tools.doors.http_door import HttpClient
from giornata_tools.doors.loras import uploaded
from giornata_tools.launcher.process import LaunchError

SIDE: Final = 128
"""Pixels; the adapters are trained on scenes of this size."""
LEAST_MASK_PX: Final = 48.0
SEEDS: Final[Mapping[str, tuple[int, int]]] = {
    "swapped": (2026, 5),
    "outlined": (2026, 7),
    "outline": (2026, 277),
}
"""By adapter: the seed of its scene."""


@dataclass(frozen=True)
class AdapterExhibit:
    """An adapter, and the edit that shows what it does."""

    adapter: AdapterCard
    exhibit: Exhibit
    """Without it."""
    control: Image.Image | None
    """RGB: what a ControlNet sees."""


def adapter_exhibits() -> tuple[AdapterExhibit, ...]:
    """One for each adapter that ships; equal at every call."""
    return tuple(map(_drawn, SEEDS))


def _drawn(name: str) -> AdapterExhibit:
    """The mask of a ControlNet's scene does not tell the place, size and turn of the thing; its outline does."""
    adapter = card.read(name)
    controlled = adapter.kind is AdapterKind.CONTROLNET
    rng = np.random.default_rng(SEEDS[name])
    drawn = sample(rng, SIDE, SceneTask.ADD, LEAST_MASK_PX, clear=True, free=controlled)
    (thing,) = drawn.asked
    asked = EditParameters(prompt=plain(thing.colour, thing.shape))
    exhibit = Exhibit(name, Image.fromarray(drawn.before), masks.image(drawn.mask), asked)
    control = Image.fromarray(control_image(drawn.asked, SIDE)) if controlled else None
    return AdapterExhibit(adapter, exhibit, control)


async def under(door: HttpClient, shown: AdapterExhibit, model: str) -> Exhibit:
    """The edit of `shown` with its adapter; a LoRA is uploaded for `model`, and ready.

    Raises:
        Refused: the gateway refuses the LoRA's file.
        LaunchError: the LoRA failed.
    """
    exhibit, adapter = shown.exhibit, shown.adapter
    asked: dict[str, object]
    if adapter.kind is AdapterKind.CONTROLNET:
        asked = {"controlnets": (AskedControl(model=adapter.name, image=0),)}
    else:
        told = await uploaded(door, adapter.file, {"model": model, "name": adapter.name})
        if told["state"] != "ready":
            raise LaunchError(f"The LoRA {adapter.name} is {told['state']}: {told['error']}")
        asked = {"loras": (AskedLora(id=told["id"]),)}
    return replace(exhibit, parameters=exhibit.parameters.model_copy(update=asked), control=shown.control)
