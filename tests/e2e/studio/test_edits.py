"""Edits on the studio page: what is sent, and what goes wrong, comes too late or too often."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import numpy as np
import pytest
from playwright.async_api import Browser, Route, expect

from giornata.wire.errors import ServiceUnavailable, TooManyPixels
from giornata_lab.bench.systems.edit_forms import file, pixels
from giornata_lab.demo.exhibits import PHOTOGRAPH_PADDING
from tests.e2e.studio.browsing import visiting
from tests.e2e.studio.easel import (
    CANCELLED,
    color_at,
    drag,
    edit,
    file_of,
    finished,
    masked,
    masked_share,
    open_picture,
    open_sample,
    ready,
)
from tests.e2e.studio.gateway import BLUE, FILL, GREEN, GREY, RED, FakeGateway, Open, plain, preview

PIECE_BYTES = 1 << 16


class Proxy:
    """Passes connections on to `target`, until they are cut."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._open: set[asyncio.StreamWriter] = set()
        self._refusing = False
        self.url = ""

    def cut(self) -> None:
        """Break every connection, and every one that is tried from now on."""
        self._refusing = True
        for writer in self._open:
            writer.transport.abort()

    def mend(self) -> None:
        """Pass connections on again."""
        self._refusing = False

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Proxy]:
        """Listen on a free port while inside."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(self._host, self._port)
        self._open |= {writer, back}
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pass(reader, back))
                tasks.create_task(_pass(there, writer))
        finally:
            self._open -= {writer, back}


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    writer.close()


pytestmark = pytest.mark.asyncio(loop_scope="session")

NOTHING = "Nothing is masked yet."
ONCE_FAILING = """([kind, method, message]) => {
    const whole = globalThis[kind].prototype[method];
    globalThis[kind].prototype[method] = () => {
        globalThis[kind].prototype[method] = whole;
        return Promise.reject(new TypeError(message));
    };
}"""


async def test_what_an_edit_lacks_is_told_at_its_place_and_what_is_set_is_sent(opened: Open) -> None:
    gateway = FakeGateway()
    async with opened(gateway) as (page, _):
        await ready(page)
        await expect(page.locator("#strength")).to_be_visible()
        for missing in ("#task", "#size", "#words", "#speed", "#reference", "#controlnet-section"):
            await expect(page.locator(missing)).to_be_hidden()  # of models that can do more
        await page.click("#go")
        await expect(page.locator("#edit-error")).to_have_text("Choose a picture first.")
        await open_picture(page, plain(GREY))
        await expect(page.locator("#edit-error")).to_be_hidden()
        await page.click("#go")
        await expect(page.locator("#edit-error")).to_have_text("Paint over what is to change first.")
        await drag(page, (-60, 0), (60, 0))
        await expect(page.locator("#edit-error")).to_be_hidden()
        await edit(page, steps=0)
        await expect(page.locator("#prompt-error")).to_have_text(
            "Write a prompt: what belongs into the mask."
        )
        await expect(page.locator("#steps-error")).to_have_text("From 1 to 200.")
        await expect(page.locator("#prompt")).to_be_focused()
        await expect(page.locator("#run")).to_be_hidden()
        assert gateway.sent == []
        await edit(page, prompt="a red star", steps=7, guidance=3.5, strength=0.6, n=1, seed=11, blur=3)
        await finished(page)
    (sent,) = gateway.sent
    assert sent.body.image == plain(GREY)
    assert sent.fields == {
        "prompt": "a red star",
        "num_inference_steps": "7",
        "guidance_scale": "3.5",
        "strength": "0.6",
        "n": "1",
        "seed": "11",
        "mask_blur": "3",
        "reuse": "auto",
        "mask_mode": "white",
        "priority": "interactive",
        "partial_images": "8",
    }


async def test_a_sample_presets_its_mask_prompt_and_crop_and_the_gateways_error_stands_at_its_field(
    opened: Open,
) -> None:
    one, two = (FILL.model_copy(update={"name": str(size), "native_size": size}) for size in (511, 512))
    gateway = FakeGateway(models=[one, two])
    async with opened(gateway) as (page, watch):
        watch.expected += ["status of 400", "status of 413"]
        for title, prompt in (("Add a star", "a blue star"), ("Remove a circle", "remove it")):
            await open_sample(page, title)
            await expect(page.locator("#prompt")).to_have_value(prompt)
        await open_sample(page, "Astronaut")
        for name, cropped in (("511", True), ("512", False)):  # larger than the model's own size, or not
            await page.select_option("#model", name)
            await expect(page.locator("#crop")).to_be_checked(checked=cropped)
        await expect(page.locator("#padding")).to_have_value(str(PHOTOGRAPH_PADDING))
        await page.evaluate("document.getElementById('steps').removeAttribute('max')")
        await edit(page, steps=100_000)
        await expect(page.locator("#steps-error")).to_contain_text("200")
        await expect(page.locator("#steps-error code")).to_have_text("invalid_field")
        await expect(page.locator("#steps")).to_have_attribute("aria-invalid", "true")
        gateway.refusals["/v1/jobs"] = TooManyPixels(field="image")
        await edit(page, steps=2)
        await expect(page.locator("p.error:visible code")).to_have_text("too_many_pixels")
        await expect(page.locator("#picture-error")).to_be_visible()
        gateway.refusals.clear()
        await page.click("#go")
        await finished(page)
        await expect(page.locator("p.error:visible")).to_have_count(0)
    assert gateway.sent[0].fields["prompt"] == "a red star"
    assert pixels(gateway.sent[0].body.picture).shape[:2] == (512, 512)


async def test_a_picture_much_larger_than_the_models_own_is_cropped_unless_a_person_says_otherwise(
    opened: Open,
) -> None:
    gateway = FakeGateway()
    async with opened(gateway) as (page, _):
        crop, padding, why = page.locator("#crop"), page.locator("#padding"), page.locator("#crop-why")
        for height, width, margin in ((200, 384, None), (385, 200, "32"), (1200, 1600, "100")):
            await open_picture(page, file(np.full((height, width, 3), GREY, np.uint8)))
            await expect(page.locator("#picture-note")).to_have_text(f"{width} × {height}")  # noqa: RUF001
            await expect(crop).to_be_checked(checked=margin is not None)  # 384 is 1.5 times the model's 256
            await expect(why).to_be_visible(visible=margin is not None)
            await expect(padding).to_be_enabled(enabled=margin is not None)
            if margin:
                await expect(padding).to_have_value(margin)
                await expect(why).to_contain_text("Best switched on here")
        await drag(page, (-60, 0), (60, 0))
        await padding.fill("")
        await edit(page, prompt="a red star")
        await expect(page.locator("#padding-error")).to_have_text("How many pixels; 0 for none.")
        await edit(page, padding=48)
        await finished(page)
        await page.uncheck("#crop")
        await open_sample(page, "Coffee")
        await expect(crop).not_to_be_checked()
        await expect(why).to_be_visible()  # advice stays, and so does the choice
        await page.click("#go")
        await finished(page, 2)
    assert [sent.fields.get("padding_mask_crop") for sent in gateway.sent] == ["48", None]


async def test_what_nobody_foresaw_is_told_the_next_edit_works_and_its_picture_is_fetched_again(
    opened: Open,
) -> None:
    gateway = FakeGateway()
    async with opened(gateway) as (page, watch):
        watch.expected.append("status of 503")
        watch.expected += ["no canvas today", "no room today", "ERR_INTERNET_DISCONNECTED"]
        await masked(page)
        await page.evaluate(ONCE_FAILING, ["OffscreenCanvas", "convertToBlob", "no canvas today"])
        await edit(page)
        await expect(page.locator("#edit-error")).to_contain_text("no canvas today")
        await expect(page.locator("#edit-error code")).to_have_text("page_failed")
        await page.context.set_offline(True)
        await page.click("#go")
        await expect(page.locator("#edit-error code")).to_have_text("gateway_unreachable")
        await expect(page.locator("#stage-note")).to_contain_text("masked")  # nothing is lost
        assert gateway.sent == []
        await page.context.set_offline(False)
        gateway.refusals["/v1/jobs/job-1/image"] = ServiceUnavailable("Busy.")
        await page.evaluate(
            ONCE_FAILING, ["Response", "blob", "network error"]
        )  # it is cut, and then refused
        await edit(page)
        await expect(page.locator("#run-link")).to_contain_text("Trying again.")
        gateway.refusals.clear()
        await finished(page, 1)
        await expect(page.locator("#run-link")).to_be_hidden()
        await expect(page.locator("#edit-error")).to_be_hidden()
        await page.evaluate(
            "() => { Storage.prototype.setItem = () => { throw new Error('no room today'); }; }"
        )
        await edit(page)
        await finished(page, 2)  # though a reload would not find it again
        await expect(page.locator("#edit-error")).to_contain_text("no room today")
        await page.evaluate("() => { Promise.reject(new Error('no canvas today')); }")
        await expect(page.locator("#edit-error")).to_contain_text("no canvas today")


async def test_however_often_edit_is_pressed_there_is_one_job_and_cancel_ends_it_while_it_is_sent(
    opened: Open,
) -> None:
    gateway = FakeGateway()
    gateway.ends.clear()
    async with opened(gateway) as (page, _):
        await masked(page)
        await page.evaluate("() => { for (const _ of [1, 2]) document.getElementById('go').click(); }")
        await expect(page.locator("#run")).to_be_visible()
        gateway.ends.set()
        await finished(page)
        assert len(gateway.sent) == 1
        await page.keyboard.down("Control")
        for _held in range(3):
            await page.keyboard.down("Enter")
        await finished(page, 2)
        await page.keyboard.down("Enter")
        await page.keyboard.up("Enter")
        await expect(page.locator("#run")).to_be_hidden()
        assert len(gateway.sent) == 2
        gateway.accepts.clear()
        gateway.ends.clear()
        await edit(page)
        await page.click("#cancel")
        await expect(page.locator("#run-text")).to_have_text(
            "Cancelling; it ends as soon as it has been sent"
        )
        assert not gateway.cancelled
        gateway.accepts.set()
        await expect(page.locator("#stage-note")).to_have_text(CANCELLED)
        assert gateway.cancelled


async def test_an_edit_outlives_a_lost_connection(browser: Browser) -> None:
    gateway = FakeGateway(events=preview(0, RED) + preview(1, GREEN))
    gateway.ends.clear()
    async with (
        gateway.listening() as url,
        Proxy(url).listening() as proxy,
        visiting(browser, proxy.url) as (page, watch),
    ):
        watch.expected.append("net::ERR_")
        await masked(page)
        await edit(page)
        await page.wait_for_selector("#stage[data-previews='2']")
        proxy.cut()
        await expect(page.locator("#run-link")).to_contain_text("The gateway does not answer.")
        await expect(page.locator("#fleet-error code")).to_have_text("gateway_unreachable")
        await expect(page.locator("#fleet-wait")).to_have_text("unknown")
        proxy.mend()
        await expect(page.locator("#fleet-error")).to_be_hidden()
        gateway.ends.set()
        await finished(page)
        await expect(page.locator("#run-link")).to_be_hidden()
    assert set(gateway.resumed) == {"2"}, "what was told is not told again"


async def test_another_picture_is_opened_and_masked_while_an_edit_goes_on(opened: Open) -> None:
    gateway = FakeGateway()
    gateway.ends.clear()
    async with opened(gateway) as (page, _):
        await masked(page)
        await edit(page)
        await expect(page.locator("#run")).to_be_visible()
        await open_picture(page, plain(BLUE))
        await expect(page.locator("#picture-note")).not_to_be_empty()
        await expect(page.locator("#stage-note")).to_have_text(NOTHING)
        await drag(page, (-60, 0), (60, 0))
        share = await masked_share(page)
        await page.click("#undo")
        await expect(page.locator("#stage-note")).to_have_text(NOTHING)
        await page.click("#redo")
        assert await masked_share(page) == share > 0
        gateway.ends.set()
        await expect(page.locator("#stage-note")).to_have_text("Finished. It is under “Earlier edits”.")
        await expect(page.locator("#result")).to_be_hidden()
        assert await color_at(page, 0, 200) == BLUE
        await page.get_by_role("button", name="Edit: a red star").click()
        await finished(page)
        assert await color_at(page, -200, 200) == GREY
        assert await color_at(page, 100, 200) == RED


async def test_what_is_found_again_after_a_reload_does_not_push_a_picture_away(opened: Open) -> None:
    gateway = FakeGateway()
    asked = asyncio.Event()

    async def late(route: Route) -> None:
        await asked.wait()
        await route.fallback()

    async with opened(gateway) as (page, _):
        await masked(page)
        await edit(page)
        await finished(page)
        await page.route("**/v1/models", late)
        await page.reload()
        await page.set_input_files("#file", file_of(plain(BLUE), "b.png"))
        await expect(page.locator("#invitation")).to_be_hidden()
        asked.set()
        await ready(page)
        await expect(page.locator("#stage-note")).to_have_text(NOTHING)
        assert await color_at(page, 0, 0) == BLUE
        await page.unroute("**/v1/models")
        await page.reload()
        await finished(page)
        assert await color_at(page, -200, 200) == GREY
