"""One exhibit through the REST door, told as it goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console

from giornata.wire.requests import Reuse
from giornata_tools.bars import edit_steps
from giornata_tools.doors.edits import EditCall, EditProgress, Preview, Tell
from giornata_tools.doors.http_door import HttpClient
from giornata_tools.launcher.demo.exhibits import Exhibit
from giornata_tools.launcher.demo.report import DemoEdit, JobFigures
from giornata_tools.loadgen.pictures import png


async def edit(door: HttpClient, exhibit: Exhibit, steps: int, seed: int, console: Console) -> DemoEdit:
    """Edit `exhibit`, every step in full.

    What is computed in full equals diffusers' own pictures; reuse has its own comparison, `make quality`.

    Raises:
        Refused: it was not accepted, or failed.
        Stopped: it was cancelled.
    """
    asked = {"num_inference_steps": steps, "seed": seed, "reuse": Reuse.OFF}
    parameters = exhibit.parameters.model_copy(update=asked)
    console.print(f'{exhibit.name}: "{parameters.prompt}"')
    fields = parameters.model_dump(mode="json", exclude_defaults=True)
    controls = () if exhibit.control is None else (png(exhibit.control),)
    order = EditCall(png(exhibit.picture), png(exhibit.mask), fields, control_images=controls)
    started_s = time.monotonic()
    with told_to(console) as tell:
        outcome = await door.edit(order, tell)
    latency_s = time.monotonic() - started_s
    figures = JobFigures.model_validate(await door.read(f"/v1/jobs/{outcome.job_id}"))
    picture = outcome.pictures[0].data
    return DemoEdit(replace(exhibit, parameters=parameters), outcome.job_id, picture, latency_s, figures)


@contextmanager
def told_to(console: Console) -> Iterator[Tell]:
    """Show what is told of an edit: a bar on a terminal, else a line each time."""
    with edit_steps(1, console) as draw:

        def tell(told: EditProgress | Preview) -> None:
            if isinstance(told, EditProgress) and not draw(told):
                step = f": step {told.step} of {told.steps}" if told.steps else ""
                console.print(f"  {told.state}{step}")

        yield tell
