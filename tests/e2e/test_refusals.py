"""Every bad picture: a 4xx, a stable code, and the next edit works. Bad fields are refused by the gateway alone."""

from __future__ import annotations

import struct
import zlib
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import pytest

from giornata_lab.bench.systems.edit_forms import box, edit_form, file, scene
from tests.e2e.live import LiveStack


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header claims a size and whose data is nearly empty: a decompression bomb."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 64))
        + chunk(b"IEND", b"")
    )


def alpha_mask() -> bytes:
    """A mask whose alpha channel is opaque everywhere."""
    mask = scene(128, 96, channels=4)
    mask[..., 3] = 255
    return file(mask)


PICTURES = {
    "not an image": ({"image": b"GIF89a nonsense"}, 400, {"unsupported_image_format", "image_unreadable"}),
    "text": ({"image": b"hello"}, 400, {"unsupported_image_format"}),
    "empty": ({"image": b""}, 400, {"invalid_field", "unsupported_image_format"}),
    "truncated": ({"image": file(scene())[:-2000]}, 400, {"image_unreadable"}),
    "bomb": ({"image": png_of(60000, 60000)}, 413, {"too_many_pixels"}),
    "truncated mask": ({"mask": file(box())[:60]}, 400, {"image_unreadable"}),
    "empty mask": ({"mask": file(np.zeros((96, 128), np.uint8))}, 400, {"mask_empty"}),
    "mask of another shape": ({"mask": file(box(128, 40))}, 400, {"mask_size_mismatch"}),
    "alpha mode, no alpha": ({"mask_mode": "alpha"}, 400, {"mask_rejected"}),
    "alpha mode, opaque": (
        {"mask_mode": "alpha", "mask": alpha_mask()},
        400,
        {"mask_rejected", "mask_empty"},
    ),
}


@pytest.fixture
async def http(stack: LiveStack) -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose base is the gateway."""
    async with aiohttp.ClientSession(stack.url) as session:
        yield session


async def test_every_bad_picture_is_refused_with_its_code_and_a_sentence(http: aiohttp.ClientSession) -> None:
    wrong = {}
    for name, (fields, status, codes) in PICTURES.items():
        async with http.post("/v1/images/edits", data=edit_form(**fields)) as answer:  # type: ignore[arg-type]  # a table of mixed fields
            body = await answer.json()
        error = body.get("error", {})
        if answer.status != status or error.get("code") not in codes or not error.get("message"):
            wrong[name] = (answer.status, body)
    assert not wrong


async def test_after_all_that_an_edit_still_works(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/images/edits", data=edit_form()) as answer:
        assert answer.status == 200, await answer.text()
    async with http.get("/readyz") as answer:
        assert answer.status == 200


async def test_unknown_routes_and_jobs_are_answered_in_the_same_form(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/jobs/job_of_nobody") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "job_not_found")
    async with http.get("/v1/nothing") as answer:
        assert answer.status == 404
        assert "code" in (await answer.json())["error"]
