"""The question for a mask through prepost's endpoint: what is found, kept, told and refused."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from giornata.blobs import RedisBlobs
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.families import Family
from giornata.wire import subjects
from giornata.wire.errors import InputLost, ServiceUnavailable, TooManyPixels, UnsupportedImageFormat
from giornata.wire.jobs import BlobRef
from giornata.wire.messages import MaskReply, MaskRequest
from giornata.wire.workers import ServiceState
from giornata_prepost.checkpoint import open_model
from tests.fakes.colours import CARD, ColourSegmenter
from tests.integration.prepost.asking import configured, own_name, png, serving
from tests.patience import HUNG_MS, HUNG_S

SCENE = np.full((48, 80, 3), 200, np.uint8)
SCENE[8:24, 4:30] = (255, 0, 0)
SCENE[30:44, 50:76] = (235, 0, 0)
SCENE[30:44, 4:20] = (0, 0, 255)
RED = (SCENE[..., 0] > 220) & (SCENE[..., 1] == 0)
FILE = png(SCENE)


pytestmark = pytest.mark.asyncio(loop_scope="module")
"""The instance of prepost is a module's."""


class Asking:
    """Questions to one instance, and what it tells of itself."""

    def __init__(self, caller: Bus, blobs: RedisBlobs, model: str, told: list[ServiceState]) -> None:
        self._caller, self._blobs, self._model, self.told = caller, blobs, model, told

    async def mask(self, image: bytes | BlobRef = FILE, **fields: Any) -> MaskReply:
        folder = f"t/{secrets.token_hex(6)}/"
        request = MaskRequest(
            image=image
            if isinstance(image, BlobRef)
            else await self._blobs.put(f"{folder}image", image, HUNG_S),
            folder=folder,
            ttl_s=HUNG_S,
            remaining_ms=HUNG_MS,
            **({"prompt": "the red hats"} | fields),
        )
        subject = subjects.prepost("mask", self._model)
        return await self._caller.call(subject, request, MaskReply, Deadline.after_ms(HUNG_MS))

    async def shown(self, ref: BlobRef | None) -> Any:
        assert ref is not None
        return np.asarray(Image.open(BytesIO(await self._blobs.get(ref))))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asking(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Any,
    nats_url: str,
    redis_url: str,
    caller: Bus,
    blobs: RedisBlobs,
) -> AsyncIterator[Asking]:
    """An instance with a segmenter, unless the parameter is False."""
    config = configured(
        tiny_checkpoint(Family.FLUX_FILL), nats_url, redis_url, model_name=own_name(), max_pixels=10_000
    )
    segmenter = ColourSegmenter() if getattr(request, "param", True) else None
    told: list[ServiceState] = []
    async with serving(config, caller, blobs, open_model(config), hear=told.append, segmenter=segmenter):
        yield Asking(caller, blobs, config.served_name, told)


async def test_regions_are_found_the_surest_first_and_their_masks_are_kept(asking: Asking) -> None:
    reply = await asking.mask(each=True)
    assert (reply.width, reply.height) == (80, 48)
    assert [region.box for region in reply.regions] == [(4, 8, 26, 16), (50, 30, 26, 14)]
    assert [region.area for region in reply.regions] == [26 * 16, 26 * 14]
    assert [region.score for region in reply.regions] == pytest.approx([1.0, 235 / 255])
    assert (reply.model, reply.threshold) == (CARD.name, CARD.threshold)
    whole = await asking.shown(reply.mask)
    assert np.array_equal(whole, RED)
    each = [await asking.shown(region.mask) for region in reply.regions]
    assert np.array_equal(each[0] | each[1], RED)
    assert not (each[0] & each[1]).any()
    surest = await asking.mask(threshold=0.95)
    assert ([region.box for region in surest.regions], surest.threshold) == ([(4, 8, 26, 16)], 0.95)
    assert surest.regions[0].mask is None


async def test_a_picture_that_is_turned_is_masked_upright(asking: Asking) -> None:
    target, exif = BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(SCENE).save(target, "PNG", exif=exif)
    reply = await asking.mask(target.getvalue())
    assert (reply.width, reply.height) == (48, 80)
    assert np.array_equal(await asking.shown(reply.mask), np.rot90(RED, -1))


async def test_what_is_no_picture_or_gone_is_told(asking: Asking) -> None:
    for image, error in (
        (b"GIF89a", UnsupportedImageFormat),
        (png(np.zeros((200, 200, 3), np.uint8)), TooManyPixels),
        (BlobRef(key="t/none", size_bytes=1, sha256="0" * 64), InputLost),
    ):
        with pytest.raises(error):
            await asking.mask(image)


async def test_telemetry_tells_what_makes_masks(asking: Asking) -> None:
    assert asking.told[-1].masks == CARD


@pytest.mark.parametrize("asking", [False], indirect=True)
async def test_without_a_segmenter_nobody_answers(asking: Asking) -> None:
    assert asking.told[-1].masks is None
    with pytest.raises(ServiceUnavailable, match="No service answers"):
        await asking.mask()
