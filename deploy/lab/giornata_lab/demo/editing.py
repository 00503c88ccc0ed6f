"""One exhibit through the REST door, told as it goes."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from typing import Final

import numpy as np
from PIL import Image
from rich.console import Console

from giornata.wire.requests import Reuse
from giornata_lab.demo.exhibits import Exhibit
from giornata_lab.demo.report import DemoEdit, JobFigures
from giornata_lab.model.scenes.masks import overlap
from giornata_tools.bars import edit_steps
from giornata_tools.doors.edits import EditCall, EditProgress, Preview, Tell
from giornata_tools.doors.http_door import HttpClient
from giornata_tools.joining.picture_files import png

MASKS: Final = "/v1/masks"


async def edit(door: HttpClient, exhibit: Exhibit, steps: int, seed: int, console: Console) -> DemoEdit:
    """Edit `exhibit`, every step in full.

    What is computed in full equals diffusers' own pictures; reuse has its own comparison, `make quality`. Of an edit by
    words the mask is asked for, to be shown, and then the edit by its words alone.

    Raises:
        Refused: it was not accepted, or failed.
        Stopped: it was cancelled.
    """
    asked = {"num_inference_steps": steps, "seed": seed, "reuse": Reuse.OFF}
    parameters = exhibit.parameters.model_copy(update=asked)
    by_words = parameters.mask_prompt is not None
    where = f' where "{parameters.mask_prompt}" is' if by_words else ""
    console.print(f'{exhibit.name}: "{parameters.prompt}"{where}')
    fields = parameters.model_dump(mode="json", exclude_defaults=True)
    controls = () if exhibit.control is None else (png(exhibit.control),)
    mask = await found(door, exhibit) if by_words else exhibit.mask
    order = EditCall(png(exhibit.picture), None if by_words else png(mask), fields, control_images=controls)
    started_s = time.monotonic()
    with told_to(console) as tell:
        outcome = await door.edit(order, tell)
    latency_s = time.monotonic() - started_s
    figures = JobFigures.model_validate(await door.read(f"/v1/jobs/{outcome.job_id}"))
    picture = outcome.pictures[0].data
    shown = replace(exhibit, parameters=parameters, mask=mask)
    shared = overlap(*(np.asarray(each) > 0 for each in (mask, exhibit.mask))) if by_words else None
    return DemoEdit(shown, outcome.job_id, picture, latency_s, figures, shared)


async def found(door: HttpClient, exhibit: Exhibit) -> Image.Image:
    """The mask of what the exhibit's words name, mode L.

    Raises:
        Refused: they name nothing, or nothing makes masks.
    """
    told = await door.send_picture(
        MASKS, png(exhibit.picture), {"prompt": exhibit.parameters.mask_prompt or ""}
    )
    return Image.open(BytesIO(base64.b64decode(told["b64_png"]))).convert("L")


@contextmanager
def told_to(console: Console) -> Iterator[Tell]:
    """Show what is told of an edit: a bar on a terminal, else a line each time."""
    with edit_steps(1, console) as draw:

        def tell(told: EditProgress | Preview) -> None:
            if isinstance(told, EditProgress) and not draw(told):
                step = f": step {told.step} of {told.steps}" if told.steps else ""
                console.print(f"  {told.state}{step}")

        yield tell
