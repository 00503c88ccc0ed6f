"""Edits that are asked for again under a key, by way of one gateway or two."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from giornata_gateway.jobs.preparation import HEADER
from tests.integration.gateway_fakes import Answer, ListedBlobs, Stage, open_gateway


def fresh() -> str:
    """A key that no other test has."""
    return secrets.token_hex(8)


async def edit(
    stage: Stage, key: str, path: str = "/v1/images/edits", image: bytes = b"picture", /, **fields: str
) -> Answer:
    form = stage.form(image, **fields)
    return await stage.post(path, data=form, headers={HEADER: key})


@asynccontextmanager
async def second_gateway(stage: Stage, folder: Path, **options: Any) -> AsyncIterator[Stage]:
    """Another gateway in front of the same router."""
    servers = stage.config.nats_url, stage.config.blobs_url
    async with open_gateway(stage.router, *servers, folder / "second", **options) as opened:
        await stage.router.announce()
        yield opened


def stored(stage: Stage) -> list[str]:
    """Pictures that lie in the blob store for the router's jobs."""
    found = [key for job_id in stage.router.submitted for key in keys_below(stage, job_id)]
    return sorted(name for name in found if name.endswith(("/image", "/mask")))


def keys_below(stage: Stage, job_id: str) -> list[str]:
    """All keys of a job's pictures in the blob store in memory."""
    assert isinstance(stage.router.blobs, ListedBlobs)
    return [key for key in stage.router.blobs.keys if key.startswith(f"default/{job_id}/")]
