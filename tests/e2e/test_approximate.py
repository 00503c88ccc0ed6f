"""A paraphrase of an edit's prompt begins with that edit's latent, through every service and the shipped model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest

import giornata.client
from giornata.api_keys import KeysFile, render, with_key
from giornata.fleet import Fleet
from giornata.wire.events import StepEvent
from giornata.wire.progress import ApproximateUse
from giornata.wire.requests import Approximate
from giornata_tools.checkout import TRAINED
from giornata_tools.quality.cases import draw, slots
from tests.e2e.live import LiveStack, live_stack
from tests.e2e.pictures import edit_form, file, pixels

ONE, OTHER = "gio_one", "gio_other"
STEPS = 20


@pytest.fixture(scope="module")
def fresco(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """A stack of the shipped model, with two tenants."""
    keys = KeysFile()
    for key, tenant in ((ONE, "one"), (OTHER, "other")):
        keys = with_key(keys, key, tenant, datetime.now(UTC))
    path: Path = tmp_path_factory.mktemp("keys") / "keys.json"
    path.write_text(render(keys))
    with live_stack(TRAINED, env={"GIORNATA_API_KEYS_FILE": str(path)}) as stack:
        yield stack


class Told(NamedTuple):
    """What one edit has come to."""

    approximate: ApproximateUse | None
    steps: list[int]
    picture: Any
    """(height, width, 3), signed."""


SLOT = next(slot for slot in slots() if slot.task == "add" and slot.side == 128)
CASE = draw(SLOT)
MASK = file((CASE.scene.mask * 255).astype(np.uint8))
WANTED = f"a {SLOT.colour} {SLOT.shape}"


async def edited(
    stack: LiveStack, prompt: str, *, key: str = ONE, image: bytes = file(CASE.bare), **fields: Any
) -> Told:
    """An edit of the one scene, through NATS."""
    asked = {"num_inference_steps": STEPS, "approximate": Approximate.AUTO, "mask_mode": "white", **fields}
    async with giornata.client.connect(stack.nats_url, api_key=key) as client:
        edit = await client.edit(image=image, mask=MASK, prompt=prompt, **asked)
        steps = [progress.step async for progress in edit if isinstance(progress, StepEvent)]
        (picture,) = (await edit.result()).pictures
    return Told(picture.approximate, steps, pixels(picture.data or b"").astype(int))


def kept(entries: int) -> Callable[[Fleet], bool]:
    return lambda fleet: any(state.prompts and state.prompts.entries >= entries for state in fleet.all())


def another_pixel() -> bytes:
    bare = CASE.bare.copy()
    bare[0, 0] = 255 - bare[0, 0]
    return file(bare)


async def answered_over_http(fresco: LiveStack) -> None:
    """The answer and the job's status tell of the first edit, too, whose prompt it has."""
    form = edit_form(file(CASE.bare), MASK, prompt=WANTED, num_inference_steps=STEPS, mask_mode="white")
    form.add_field("approximate", "auto")
    headers = {"Authorization": f"Bearer {ONE}"}
    async with (
        aiohttp.ClientSession(fresco.url, headers=headers) as http,
        http.post("/v1/images/edits", data=form) as answer,
    ):
        body = await answer.json()
        assert answer.status == 200, body
        (use,) = body["giornata"]["approximate"]
        async with http.get(f"/v1/jobs/{body['giornata']['job_id']}") as status:
            (picture,) = (await status.json())["pictures"]
    assert use == {"step": use["step"], "cosine": 1.0}
    assert picture["approximate"] == use


async def test_a_paraphrase_takes_fewer_steps_and_other_requests_all(fresco: LiveStack) -> None:
    first = await edited(fresco, WANTED, seed=1)
    assert (first.approximate, first.steps) == (None, list(range(1, STEPS + 1)))
    await fresco.until(kept(1))
    told = await edited(fresco, f"put {WANTED} here", seed=2)
    use = told.approximate
    assert use is not None
    assert 0 < use.step <= STEPS // 2
    assert 0.75 <= use.cosine <= 1
    assert told.steps == list(range(use.step + 1, STEPS + 1))
    assert use.entry == "", "other jobs are not told of"
    own = await edited(fresco, f"put {WANTED} here", seed=2, approximate=Approximate.OFF)
    assert own.approximate is None
    assert np.abs(told.picture - first.picture).mean() < np.abs(told.picture - own.picture).mean()

    others: list[dict[str, Any]] = [
        {"key": OTHER},
        {"image": another_pixel()},
        {"grow_mask": 12},
        {"num_inference_steps": STEPS - 1},
        {"guidance_scale": 20.0},
    ]
    for other in others:
        miss = await edited(fresco, WANTED, seed=2, **other)
        assert miss.approximate is None, other
    await answered_over_http(fresco)
