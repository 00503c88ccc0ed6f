"""Sends the edits through the system, a bounded number at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from giornata import client
from giornata.wire.errors import GiornataError
from giornata.wire.jobs import Priority
from giornata.wire.requests import MaskMode, Reuse
from giornata_tools.launcher.process import LaunchError
from giornata_tools.loadgen.pictures import png
from giornata_tools.model.scenes import masks
from giornata_tools.quality.cases import Case
from giornata_tools.quality.metrics import Pixels
from giornata_tools.quality.report import MaskBlur
from giornata_tools.quality.system import System


@dataclass(frozen=True)
class EditSetting:
    """How every edit is made."""

    steps: int
    guidance_scale: float | None
    """None where the model takes none."""
    mask_blur: MaskBlur
    reuse: Reuse
    in_flight: int
    timeout_s: float
    """For one edit, waiting included."""


Done = Callable[[Case, Pixels, float], None]
"""Told of each edit with its picture, (height, width, 3), and the seconds that it took."""


async def edit_all(system: System, cases: Iterable[Case], setting: EditSetting, done: Done) -> None:
    """Every case as one edit over NATS, `setting.in_flight` at a time.

    Raises:
        LaunchError: the system cannot be reached, or an edit was refused or failed; the others are given up.
    """
    ahead = iter(cases)
    try:
        async with (
            client.connect(
                system.nats_url, redis_url=system.redis_url, api_key=system.api_key, name="quality"
            ) as to,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(setting.in_flight):
                tasks.create_task(_edit_some(to, system.card.name, ahead, setting, done))
    except BaseExceptionGroup as group:
        expected, rest = group.split(LaunchError)
        if expected is None or rest is not None:
            raise
        raise expected.exceptions[0] from None
    except GiornataError as error:
        raise LaunchError(str(error)) from error


async def _edit_some(
    to: client.Client, model: str, ahead: Iterator[Case], setting: EditSetting, done: Done
) -> None:
    """Take from `ahead`, which others take from as well, until it is empty."""
    for case in ahead:
        started_s = time.monotonic()
        try:
            picture = await _edit(to, model, case, setting)
        except GiornataError as error:
            raise LaunchError(f"{case.slot.name}: {error.code}: {error}") from error
        done(case, picture, time.monotonic() - started_s)


async def _edit(to: client.Client, model: str, case: Case, setting: EditSetting) -> Pixels:
    guidance: dict[str, Any] = (
        {} if setting.guidance_scale is None else {"guidance_scale": setting.guidance_scale}
    )
    accepted = await to.edit(
        image=png(Image.fromarray(case.scene.before)),
        mask=png(masks.image(case.scene.mask)),
        prompt=case.scene.caption,
        timeout_s=setting.timeout_s,
        priority=Priority.BATCH,
        model=model,
        seed=case.slot.index,
        num_inference_steps=setting.steps,
        mask_mode=MaskMode.WHITE,
        mask_blur=setting.mask_blur.of(case.slot.task),
        reuse=setting.reuse,
        **guidance,
    )
    result = await accepted
    picture = np.asarray(Image.open(BytesIO(result.pictures[0].data)).convert("RGB"))
    if picture.shape != case.scene.before.shape:
        raise LaunchError(
            f"{case.slot.name}: received a picture of {picture.shape}, not {case.scene.before.shape}."
        )
    return picture
