"""The scenes in which the LoRA profiler sees how late a LoRA may join: ``python -m giornata_lab.quality.probes``.

The profiler runs where the lab is not, so that they are files there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from PIL import Image

from giornata_lab.model.scenes import SceneTask, shapes
from giornata_lab.quality import cases
from giornata_tools.lora_profiler.probes import MASK_SUFFIX, PROMPT_SUFFIX, SCENES, png

COUNT: Final = 8


def draw(folder: Path) -> None:
    """Write `COUNT` of the held-out edits of small pictures that add a thing, spread over them, into `folder`."""
    side = min(cases.ADDITIONS)
    slots = [slot for slot in cases.slots() if slot.task is SceneTask.ADD and slot.side == side]
    folder.mkdir(parents=True, exist_ok=True)
    for case in map(cases.draw, cases.spread(slots, COUNT)):
        name, scene = case.slot.name, case.scene
        (folder / f"{name}.png").write_bytes(png(Image.fromarray(scene.before)))
        (folder / f"{name}{MASK_SUFFIX}").write_bytes(png(shapes.image(scene.mask)))
        (folder / f"{name}{PROMPT_SUFFIX}").write_text(f"{scene.caption}\n", encoding="utf-8")


if __name__ == "__main__":
    draw(SCENES)
