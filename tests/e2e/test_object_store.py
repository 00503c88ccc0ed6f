"""A whole edit through every service, with an S3-compatible object store in place of Valkey."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from obstore.store import S3Store
from tenacity import AsyncRetrying, stop_after_delay, wait_fixed
from tenacity.retry import retry_if_result

import giornata.client
from giornata.wire.messages import INLINE_BYTES
from giornata.wire.workers import ServiceName
from tests.e2e.live import LiveStack, live_stack
from tests.e2e.pictures import box, edit_form, file, pixels, scene
from tests.s3_server import BUCKET, CREDENTIALS, S3Server, s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def stack(tiny_model: Path, s3: S3Server) -> Iterator[LiveStack]:
    with live_stack(tiny_model, env=CREDENTIALS, blobs_url=s3.url()) as live:
        yield live


def objects(s3: S3Server) -> set[str]:
    """What kinds of blobs lie in the bucket."""
    key, secret = CREDENTIALS.values()
    store = S3Store(
        BUCKET,
        endpoint=s3.endpoint,
        region="us-east-1",
        access_key_id=key,
        secret_access_key=secret,
        client_options={"allow_http": True},
    )
    return {found["path"].rpartition("/")[2].partition("-")[0] for found in store.list().collect()}


async def test_an_edit_over_an_object_store(stack: LiveStack, s3: S3Server) -> None:
    original = scene(200, 136)
    async with aiohttp.ClientSession(stack.url) as http:
        form = edit_form(file(original), file(box(200, 136)), mask_blur=0)
        async with http.post("/v1/images/edits", data=form) as answer:
            body = await answer.json()
            assert answer.status == 200, body
    result = pixels(base64.b64decode(body["data"][0]["b64_json"]))
    inside = box(200, 136) == 255
    assert np.array_equal(result[~inside], original[~inside])
    assert np.abs(result[inside].astype(int) - original[inside]).mean() > 5
    polled = AsyncRetrying(
        retry=retry_if_result(lambda names: names != {"image", "shared", "writable"}),
        wait=wait_fixed(0.2),
        stop=stop_after_delay(30),
    )
    await polled(asyncio.to_thread, objects, s3)  # the router deletes behind the answer


async def test_a_large_picture_travels_as_a_claim_check(
    stack: LiveStack, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    noise = np.random.default_rng(0).integers(0, 255, (1500, 1500, 3), dtype=np.uint8)
    picture = file(noise)
    assert len(picture) > INLINE_BYTES
    async with giornata.client.connect(stack.nats_url, blobs_url=stack.blobs_url) as client:
        mask = np.zeros(noise.shape[:2], np.uint8)
        mask[700:740, 700:740] = 255
        edit = await client.edit(
            image=picture, mask=file(mask), prompt="a red star", num_inference_steps=2, padding_mask_crop=8
        )
        result = await edit
    assert pixels(result.pictures[0].data).shape == noise.shape


async def test_credentials_are_in_no_log(stack: LiveStack) -> None:
    logs = "".join(stack.log(name) for service in ServiceName for name in stack.instances(service))
    assert not any(value in logs for value in CREDENTIALS.values())
