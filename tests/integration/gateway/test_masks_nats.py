"""``giornata.mask``: masks from words over NATS, by the way of ``POST /v1/masks``."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

import giornata.client
from giornata.bus import bus
from giornata.wire import codec, subjects
from giornata.wire.errors import (
    DeadlineExceeded,
    GiornataError,
    InvalidField,
    MasksNotServed,
    NothingFound,
    PayloadTooLarge,
    RateLimited,
    TooManyRequests,
    Unauthorized,
)
from giornata.wire.jobs import BlobRef
from giornata.wire.masks import MaskMessage, MaskMessageReply, MaskParameters
from giornata.wire.messages import IDEMPOTENCY_HEADER
from giornata_gateway import nats_door
from giornata_gateway.intake.rules.envelopes import REPLY_MARGIN_BYTES
from tests.fakes.colours import CARD
from tests.fakes.key_files import write_keys
from tests.integration.gateway.test_masks import FILE, Scene, forgotten, seeing
from tests.integration.gateway_fakes import Stage, open_stage
from tests.patience import HUNG_S

HATS = "the red hats"


@pytest.fixture
async def scene(stage: Stage) -> AsyncIterator[Scene]:
    async with seeing(stage) as scene:
        yield scene


async def test_both_doors_show_the_same_and_keep_nothing(scene: Scene, nats_url: str) -> None:
    _, told = await scene.told(max_regions="2", mask_threshold="0.6")
    async with giornata.client.connect(nats_url) as client:
        made = await client.mask(image=FILE, prompt=HATS, max_regions=2, mask_threshold=0.6)
    assert (made.width, made.height, made.model, made.threshold) == (80, 48, CARD.name, 0.6)
    assert base64.b64encode(made.data).decode() == told["b64_png"]
    assert [
        {
            "score": one.score,
            "box": list(one.box),
            "area": one.area,
            "b64_png": base64.b64encode(one.data).decode(),
        }
        for one in made.regions
    ] == told["regions"]
    over_http, over_nats = scene.prepost.asked
    own = {"image", "folder", "remaining_ms", "ttl_s"}
    assert over_nats.model_dump(exclude=own) == over_http.model_dump(exclude=own)
    for name in ("image", "mask", "region_0", "region_1"):
        kept = over_nats.image.model_copy(update={"key": over_nats.folder + name})
        await forgotten(scene.stage.router.blobs, kept)
    async with scene.stage.http.get("/metrics") as response:
        counted = [
            line for line in (await response.text()).splitlines() if f'route="{subjects.MASK}"' in line
        ]
    assert any(line.startswith("giornata_requests_total") and line.endswith(" 1.0") for line in counted)


async def test_a_mask_that_does_not_fit_is_a_claim_check_of_which_an_edit_can_be_made(
    nats_url: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_door, "REPLY_BYTES", REPLY_MARGIN_BYTES)
    async with open_stage(nats_url, redis_url, tmp_path) as stage, seeing(stage) as scene:
        _, told = await scene.told()
        image = await stage.router.blobs.put("default/upload/image", FILE, 60)
        made = await answered(nats_url, image=image)
        assert made.data is None
        assert made.ref is not None
        assert all(one.data is None and one.ref is not None for one in made.regions)
        async with giornata.client.connect(nats_url, blobs_url=redis_url) as client:
            whole = await client.mask(image=FILE, prompt=HATS)
        assert base64.b64encode(whole.data).decode() == told["b64_png"]
        assert [base64.b64encode(one.data).decode() for one in whole.regions] == [
            one["b64_png"] for one in told["regions"]
        ]
        await forgotten(
            stage.router.blobs, image.model_copy(update={"key": f"{scene.prepost.asked[-1].folder}image"})
        )
        assert await stage.router.blobs.has(made.ref), "it is there for its tenant"
        assert await stage.router.blobs.has(image), "so is what the tenant has stored"
        async with giornata.client.connect(nats_url) as client:
            with pytest.raises(PayloadTooLarge, match="blobs_url"):
                await client.mask(image=FILE, prompt=HATS)


async def answered(
    nats_url: str, headers: dict[str, str] | None = None, /, **changes: Any
) -> MaskMessageReply:
    """The answer to a message with `changes`, which are not validated."""
    asked = codec.unpack(codec.encode(MaskMessage(parameters=MaskParameters(prompt=HATS), image=FILE)))
    told = {name: dict(value) if isinstance(value, BlobRef) else value for name, value in changes.items()}
    data = msgpack.packb(asked | told)
    async with bus.connect(nats_url, "bare") as connected:
        reply = await connected.client.request(subjects.MASK, data, timeout=HUNG_S, headers=headers)
    return bus.answer_in(reply, MaskMessageReply)


async def test_bad_messages_are_refused_by_name(scene: Scene, nats_url: str) -> None:
    for changes, code, field in (
        ({"image": b""}, "invalid_field", "image"),
        ({"image": b"GIF89a"}, "unsupported_image_format", "image"),
        ({"image": b"x" * ((6 << 20) + 1)}, "payload_too_large", "image"),
        ({"image": BlobRef(key="bob/x", size_bytes=3, sha256="0" * 64)}, "invalid_field", "image"),
        ({"image": BlobRef(key="default/no", size_bytes=3, sha256="0" * 64)}, "invalid_field", "image"),
        ({"image": BlobRef(key="default/no", size_bytes=1 << 40, sha256="0" * 64)}, "payload_too_large", "image"),
        ({"remaining_ms": 0}, "invalid_field", "remaining_ms"),
        ({"parameters": {"prompt": " "}}, "invalid_field", "prompt"),
        ({"parameters": {"prompt": HATS, "max_regions": 17}}, "invalid_field", "max_regions"),
        ({"parameters": {"prompt": HATS, "mask_threshold": 2.0}}, "invalid_field", "mask_threshold"),
        ({"parameters": {"prompt": HATS, "model": "other"}}, "model_not_found", "model"),
        ({"parameters": {"prompt": HATS, "response_format": "image"}}, "unknown_field", "response_format"),
        ({"parameters": [HATS]}, "invalid_field", "parameters"),
    ):  # fmt: skip
        with pytest.raises(GiornataError) as refused:
            await answered(nats_url, **changes)
        assert (refused.value.code, refused.value.field) == (code, field), changes
    with pytest.raises(GiornataError) as refused:
        await answered(nats_url, {IDEMPOTENCY_HEADER: "k"})
    assert (refused.value.code, refused.value.field) == ("not_supported", IDEMPOTENCY_HEADER)
    assert [one.image.size_bytes for one in scene.prepost.asked] == [len(b"GIF89a")], (
        "all others were not asked"
    )


async def test_what_is_not_there_is_told_by_the_same_errors(stage: Stage, nats_url: str) -> None:
    async with giornata.client.connect(nats_url) as client:
        with pytest.raises(MasksNotServed):
            await client.mask(image=FILE, prompt="red")
        async with seeing(stage) as scene:
            with pytest.raises(NothingFound, match="the green hat"):
                await client.mask(image=FILE, prompt="the green hat")
            with pytest.raises(InvalidField, match="prompt"):
                await client.mask(image=FILE, prompt="x" * 201)
            scene.prepost.hold = asyncio.Event()
            with pytest.raises(DeadlineExceeded):
                await client.mask(image=FILE, prompt="red", timeout_s=1)
            scene.prepost.hold.set()
            assert (await client.mask(image=FILE, prompt="red")).regions


async def test_keys_and_limits_are_those_of_the_other_door(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path, {"sk-alice-123": "alice", "sk-robert-12": "bob"})
    options: dict[str, Any] = {"api_keys_file": keys, "tenant_per_minute": 1, "max_held_bytes": 2 << 20}
    options["max_request_bytes"] = 2 << 20
    async with open_stage(nats_url, redis_url, tmp_path, **options) as stage, seeing(stage) as scene:
        with pytest.raises(Unauthorized):
            await answered(nats_url)
        with pytest.raises(TooManyRequests, match="being received"):
            await answered(nats_url, api_key="sk-alice-123", image=b"x" * (3 << 19))
        await answered(nats_url, api_key="sk-alice-123")
        with pytest.raises(RateLimited):
            await answered(nats_url, api_key="sk-alice-123")
        alice, bob = ({"Authorization": f"Bearer {key}"} for key in ("sk-alice-123", "sk-robert-12"))
        assert [(await scene.masks(FILE, who))[0] for who in (alice, bob)] == [429, 200]
    assert [one.folder.partition("/")[0] for one in scene.prepost.asked] == ["alice", "bob"]
