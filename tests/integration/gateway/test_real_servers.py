"""A gateway before real servers, over real sockets: its process, a client of the blob store, and `webuiapi`."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
import webuiapi

import giornata.client
from giornata.wire.adapters import ControlCard, ControlKind
from giornata.wire.errors import PayloadTooLarge
from giornata_gateway import nats_door
from giornata_gateway.nats_door import REPLY_MARGIN_BYTES
from tests.fakes.fleet import SDXL
from tests.integration.gateway.test_masks import FILE, HATS, answered, forgotten, seeing
from tests.integration.gateway_fakes import Opening
from tests.patience import HUNG_S
from tests.present import present

pytestmark = pytest.mark.real_nats


async def test_a_mask_that_does_not_fit_is_a_claim_check_of_which_an_edit_can_be_made(
    nats_url: str, redis_url: str, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_door, "REPLY_BYTES", REPLY_MARGIN_BYTES)
    async with opening() as stage, seeing(stage) as scene:
        told = (await scene.masks()).json
        image = await stage.router.blobs.put("default/upload/image", FILE, HUNG_S)
        made = await answered(nats_url, image=image)
        assert made.data is None
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
        assert await stage.router.blobs.has(present(made.ref)), "it is there for its tenant"
        assert await stage.router.blobs.has(image), "so is what the tenant has stored"
        async with giornata.client.connect(nats_url) as client:
            with pytest.raises(PayloadTooLarge, match="blobs_url"):
                await client.mask(image=FILE, prompt=HATS)


async def test_webuiapi_sets_the_options_that_it_got_and_lists_what_there_is(opening: Opening) -> None:
    async with opening() as sdxl:
        sdxl.router.cards = (SDXL,)
        card = ControlCard(name="outline", digest="0123abcd" * 8, kind=ControlKind.UNET, text_channels=32)
        sdxl.router.controlnets = {SDXL.name: (card,)}
        await sdxl.router.announce()
        host, port = sdxl.url.removeprefix("http://").split(":")

        def use() -> dict[str, Any]:
            client = webuiapi.WebUIApi(host=host, port=int(port))
            with client.session:
                client.util_set_model("sdxl")
                return {
                    "options": client.set_options(client.get_options()),
                    "current": client.util_get_current_model(),
                    "schedulers": client.util_get_scheduler_names(),
                    "upscalers": [upscaler["name"] for upscaler in client.get_upscalers()],
                    "empty": [client.get_latent_upscale_modes(), client.get_sd_vae()],
                    "flags": client.get_cmd_flags()["api"],
                    "memory": client.get_memory().keys(),
                    "done": [client.refresh_checkpoints(), client.skip(), client.interrupt()],
                    "controlnets": client.controlnet_model_list(),
                    "modules": client.controlnet_module_list(),
                    "version": client.controlnet_version(),
                }

        assert await asyncio.to_thread(use) == {
            "options": {},
            "current": "sdxl [5555555555]",
            "schedulers": ["automatic", "karras", "uniform"],
            "upscalers": ["None"],
            "empty": [[], []],
            "flags": True,
            "memory": {"ram", "cuda"},
            "done": [{}, {}, {}],
            "controlnets": ["outline [0123abcd]"],
            "modules": ["none", "canny", "soft_edge", "tile", "tile_resample"],
            "version": 2,
        }
