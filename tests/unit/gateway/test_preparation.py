from __future__ import annotations

import asyncio
from typing import cast

import pytest

from giornata.blobs import MemoryBlobs
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.families import Family
from giornata.wire.adapters import LoraUse
from giornata.wire.errors import BlobStoreFull
from giornata.wire.jobs import BlobRef, Priority
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters
from giornata.wire.workers import FleetSummary, ServiceName
from giornata_gateway.config import GatewayConfig
from giornata_gateway.fleet import FleetListener
from giornata_gateway.jobs.preparation import EditOrder, JobPreparer, SegmentationClient
from giornata_gateway.rules.tenants import Tenant

CARD = ModelCard(
    name="tiny", family=Family.FLUX_FILL, digest="d", vae_scale_factor=8, latent_channels=16, max_text_tokens=48,
    takes_guidance=False, takes_true_cfg=False, default_steps=4, default_guidance_scale=1, default_strength=1,
)  # fmt: skip


def order_of(image: bytes | BlobRef, mask: bytes) -> EditOrder:
    return EditOrder(
        EditParameters(prompt="x"),
        image,
        mask,
        Tenant("alice"),
        Priority.BATCH,
        Deadline.after_ms(60_000),
        None,
    )


def preparation_of(blobs: MemoryBlobs, tasks: asyncio.TaskGroup) -> JobPreparer:
    fleet = FleetListener(bridged_s=0)
    ready = {ServiceName.PREPOST: 1, ServiceName.DENOISER: 1}
    fleet.hear(FleetSummary(router="r", ready=ready, models=(CARD,)))
    config = GatewayConfig(instance="gateway-1", result_ttl_s=60)
    nobody = cast("Bus", None)  # no order here asks for a mask
    return JobPreparer(
        config, blobs, fleet, no_loras, SegmentationClient(config, nobody, blobs, fleet, tasks), tasks
    )


async def no_loras(tenant: str, asked: EditParameters, card: ModelCard) -> tuple[LoraUse, ...]:
    assert (tenant, card, asked.loras) == ("alice", CARD, ())
    return ()


async def test_nothing_stays_of_an_order_whose_mask_finds_no_room() -> None:
    blobs = MemoryBlobs(capacity_bytes=10)
    async with asyncio.TaskGroup() as tasks:
        with pytest.raises(BlobStoreFull):
            await preparation_of(blobs, tasks).prepare(order_of(b"12345678", b"1234"))
    await blobs.put("alice/other", b"1234567890", 60)


async def test_forgetting_a_job_leaves_the_claim_checks_of_its_caller() -> None:
    blobs = MemoryBlobs()
    own = await blobs.put("alice/upload_1/image", b"image", 60)
    async with asyncio.TaskGroup() as tasks:
        preparation = preparation_of(blobs, tasks)
        job = await preparation.prepare(order_of(own, b"mask"))
        assert job.image == own
        assert job.mask is not None
        assert job.mask.key.startswith(f"alice/{job.job_id}/")
        await preparation.forget(job)
        assert await blobs.has(own)
        assert not await blobs.has(job.mask)
