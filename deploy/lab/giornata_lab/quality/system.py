"""The system that is measured, one that runs already or a stack that is started, and the edits sent through it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from giornata import client
from giornata.fleet import Fleet
from giornata.scratch import scratch_folder
from giornata.wire.errors import GiornataError, NotPermitted, ServiceUnavailable
from giornata.wire.jobs import Priority
from giornata.wire.models import ModelCard
from giornata.wire.requests import MaskMode, Reuse
from giornata_lab.model.scenes import shapes
from giornata_lab.quality.cases import QualityCase
from giornata_lab.quality.metrics import Pixels
from giornata_lab.quality.report import MaskBlur
from giornata_tools.checkout import MODELS
from giornata_tools.launcher import models
from giornata_tools.launcher.plan import planned, socket_folder
from giornata_tools.launcher.process import LaunchError
from giornata_tools.launcher.stack import TelemetryWatch, running
from giornata_tools.lora_profiler.probes import png

HEARD_S: Final = 10.0
"""How long a running system's telemetry is waited for; it comes 2-4 times a second."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class SystemUnderTest:
    """Where edits go, and the model that makes them."""

    nats_url: str
    blobs_url: str | None
    api_key: str | None
    card: ModelCard


@asynccontextmanager
async def attached(nats_url: str, model_name: str | None) -> AsyncIterator[SystemUnderTest]:
    """The system that runs at `nats_url`; its telemetry is heard as the user `observer`.

    Raises:
        LaunchError: no server answers, or lets us hear; no worker serves `model_name`, or several models are served and
            none is named.
    """
    watch = TelemetryWatch()
    password_file = os.environ.get("GIORNATA_NATS_PASSWORD_FILE")
    try:
        async with watch.listening(nats_url, Path(password_file) if password_file else None):
            await watch.until(
                lambda fleet: bool(fleet.cards()),
                HEARD_S,
                lambda _: "no model is served at this NATS address.",
            )
            card = _chosen(watch.fleet, model_name)
    except (ServiceUnavailable, NotPermitted) as error:
        raise LaunchError(str(error)) from error
    blobs_url, key = (os.environ.get(name) or None for name in ("GIORNATA_BLOBS_URL", "GIORNATA_API_KEY"))
    yield SystemUnderTest(nats_url, blobs_url, key, card)


@asynccontextmanager
async def started(logs: Path, torch_threads: int, say: Say) -> AsyncIterator[SystemUnderTest]:
    """A stack of one instance of each service, drained on leaving.

    Raises:
        LaunchError: something did not start, or did not end in order.
    """
    chosen = await models.choose(os.environ, None, MODELS, say)
    with scratch_folder(socket_folder()) as state:
        plan = planned((chosen,), state, logs, torch_threads, {"GIORNATA_API_KEYS_FILE": ""})
        say("Starting NATS, Valkey and six services.")
        async with running(plan, say) as stack:
            await stack.bring_up()
            yield SystemUnderTest(
                stack.nats_url, stack.blobs_url, None, _chosen(stack.watch.fleet, chosen.name)
            )
        if stack.obituaries:
            raise LaunchError("\n".join(stack.obituaries))


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


Done = Callable[[QualityCase, Pixels, float], None]
"""Told of each edit with its picture, (height, width, 3), and the seconds that it took."""


async def edit_all(
    system: SystemUnderTest, cases: Iterable[QualityCase], setting: EditSetting, done: Done
) -> None:
    """Every case as one edit over NATS, `setting.in_flight` at a time.

    Raises:
        LaunchError: the system cannot be reached, or an edit was refused or failed; the others are given up.
    """
    ahead = iter(cases)
    try:
        async with (
            client.connect(
                system.nats_url, blobs_url=system.blobs_url, api_key=system.api_key, name="quality"
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
    to: client.Client, model_name: str, ahead: Iterator[QualityCase], setting: EditSetting, done: Done
) -> None:
    """Take from `ahead`, which others take from as well, until it is empty."""
    for case in ahead:
        started_s = time.monotonic()
        try:
            picture = await _edit(to, model_name, case, setting)
        except GiornataError as error:
            raise LaunchError(f"{case.slot.name}: {error.code}: {error}") from error
        done(case, picture, time.monotonic() - started_s)


async def _edit(to: client.Client, model_name: str, case: QualityCase, setting: EditSetting) -> Pixels:
    guidance: dict[str, Any] = (
        {} if setting.guidance_scale is None else {"guidance_scale": setting.guidance_scale}
    )
    accepted = await to.edit(
        image=png(Image.fromarray(case.scene.before)),
        mask=png(shapes.image(case.scene.mask)),
        prompt=case.scene.caption,
        timeout_s=setting.timeout_s,
        priority=Priority.BATCH,
        model=model_name,
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


def _chosen(fleet: Fleet, name: str | None) -> ModelCard:
    cards = fleet.cards()
    if name is None and len(cards) == 1:
        return next(iter(cards.values()))
    if name not in cards:
        raise LaunchError(f"The model to measure: received {name}, accepted {', '.join(sorted(cards))}.")
    return cards[name]
