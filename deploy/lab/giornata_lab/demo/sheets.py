"""The pictures that the demo writes: those of each edit, and sheets that compare them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from PIL import Image

from giornata_lab.demo import comparison
from giornata_lab.demo.report import WORDS, AdapterEdit, DemoEdit

EDIT_HEIGHT: Final = 360
"""Height of a picture in the comparison, in pixels."""
ADAPTER_HEIGHT: Final = 256
"""The same where adapters are compared."""


def write(edits: Sequence[DemoEdit], adapters: Sequence[AdapterEdit], out: Path) -> None:
    """Write a folder for each into `out`, and a sheet of all edits and one of all adapters, where there are any."""
    for done in edits:
        _write_edit(done, out / done.exhibit.name)
    comparison.stacked([_row(done) for done in edits]).save(out / "comparison.png")
    for adapted in adapters:
        folder = out / adapted.adapter.name
        _write_edit(adapted.under, folder)
        (folder / "without.png").write_bytes(adapted.without.picture)
    if adapters:
        comparison.stacked(list(map(_adapter_row, adapters))).save(out / "adapters.png")


def _write_edit(done: DemoEdit, folder: Path) -> None:
    folder.mkdir()
    done.exhibit.picture.save(folder / "input.png")
    done.exhibit.mask.save(folder / "mask.png")
    if done.exhibit.control is not None:
        done.exhibit.control.save(folder / "control.png")
    (folder / "output.png").write_bytes(done.picture)


def _row(done: DemoEdit) -> Image.Image:
    exhibit = done.exhibit
    output = f"output: {done.figures.steps} steps, {done.latency_s:.2f} s"
    panels = ((exhibit.picture, "input"), _asked(done), (Image.fromarray(done.after), output))
    return comparison.side_by_side([(_scaled(picture, EDIT_HEIGHT), caption) for picture, caption in panels])


def _adapter_row(adapted: AdapterEdit) -> Image.Image:
    control = adapted.under.exhibit.control
    panels = (
        _asked(adapted.without),
        *(() if control is None else ((control, "control image"),)),
        (Image.fromarray(adapted.without.after), "without"),
        (
            Image.fromarray(adapted.under.after),
            f"with the {WORDS[adapted.adapter.kind]} {adapted.adapter.name}",
        ),
    )
    return comparison.side_by_side(
        [(_scaled(picture, ADAPTER_HEIGHT), caption) for picture, caption in panels]
    )


def _asked(done: DemoEdit) -> tuple[Image.Image, str]:
    asked = done.exhibit.parameters
    words = "" if asked.mask_prompt is None else f'"{asked.mask_prompt}": '
    return comparison.overlay(done.exhibit.picture, done.alpha), f'{words}"{asked.prompt}"'


def _scaled(picture: Image.Image, height: int) -> Image.Image:
    width = round(picture.width * height / picture.height)
    return picture.resize((width, height), Image.Resampling.LANCZOS)
