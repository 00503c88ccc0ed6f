"""What goes wrong, comes too late or too often on the studio page, against a gateway inside the browser."""

from __future__ import annotations

import asyncio
import re

import pytest
from playwright.async_api import Route, expect

from tests.e2e.studio.easel import (
    CANCELLED,
    color_at,
    drag,
    edit,
    finished,
    masked,
    masked_share,
    open_picture,
    ready,
)
from tests.e2e.studio.gateway import BLUE, GREY, RED, FakeGateway, Open, plain

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_what_is_set_is_what_is_sent(opened: Open) -> None:
    gateway = FakeGateway()
    async with opened(gateway) as (page, _):
        await masked(page)
        await edit(page, steps=7, guidance=3.5, strength=0.6, n=1, seed=11, blur=3)
        await finished(page)
    (form,) = gateway.forms
    sent = {
        name.decode(): value.decode() for name, value in re.findall(rb'name="(\w+)"\r\n\r\n([^\r]*)', form)
    }
    assert sent == {
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


async def test_a_picture_that_is_cut_or_refused_on_its_way_is_fetched_again(opened: Open) -> None:
    answers = iter([503])

    async def busy(route: Route) -> None:
        status = next(answers, None)
        await (route.fallback() if status is None else route.fulfill(status=status, body="{}"))

    async with opened(FakeGateway()) as (page, watch):
        watch.expected.append("status of 503")
        await page.route("**/image*", busy)
        await masked(page)
        await page.evaluate("""() => {
            const whole = Response.prototype.blob;
            Response.prototype.blob = () => {
                Response.prototype.blob = whole;
                return Promise.reject(new TypeError("network error"));
            };
        }""")
        await edit(page)
        await finished(page)
        await expect(page.locator("#run-link")).to_be_hidden()
        await expect(page.locator("#edit-error")).to_be_hidden()


async def test_what_nobody_foresaw_is_told_and_the_next_edit_works(opened: Open) -> None:
    gateway = FakeGateway()
    async with opened(gateway) as (page, watch):
        watch.expected += ["no canvas today", "no room today"]
        await masked(page)
        await page.evaluate("""() => {
            const whole = OffscreenCanvas.prototype.convertToBlob;
            OffscreenCanvas.prototype.convertToBlob = () => {
                OffscreenCanvas.prototype.convertToBlob = whole;
                return Promise.reject(new Error("no canvas today"));
            };
        }""")
        await edit(page)
        await expect(page.locator("#edit-error")).to_contain_text("no canvas today")
        await expect(page.locator("#edit-error code")).to_have_text("page_failed")
        assert gateway.forms == []
        await page.evaluate(
            "() => { Storage.prototype.setItem = () => { throw new Error('no room today'); }; }"
        )
        await edit(page)
        await finished(page)  # though a reload would not find it again
        await expect(page.locator("#edit-error")).to_contain_text("no room today")
        await page.evaluate("() => { Promise.reject(new Error('no canvas today')); }")
        await expect(page.locator("#edit-error")).to_contain_text("no canvas today")


async def test_however_often_edit_is_pressed_there_is_one_job(opened: Open) -> None:
    gateway = FakeGateway()
    gateway.ends.clear()
    async with opened(gateway) as (page, _):
        await masked(page)
        await page.evaluate("() => { for (const _ of [1, 2]) document.getElementById('go').click(); }")
        await expect(page.locator("#run")).to_be_visible()
        gateway.ends.set()
        await finished(page)
        assert len(gateway.forms) == 1
        await page.keyboard.down("Control")
        for _held in range(3):
            await page.keyboard.down("Enter")
        await expect(page.locator("#visit-strip button")).to_have_count(2)
        await page.keyboard.down("Enter")
        await page.keyboard.up("Enter")
        await expect(page.locator("#run")).to_be_hidden()
        assert len(gateway.forms) == 2


async def test_cancel_while_the_picture_is_sent_ends_the_job_that_comes_of_it(opened: Open) -> None:
    gateway = FakeGateway()
    gateway.accepts.clear()
    gateway.ends.clear()
    async with opened(gateway) as (page, _):
        await masked(page)
        await edit(page)
        await page.click("#cancel")
        await expect(page.locator("#run-text")).to_have_text(
            "Cancelling; it ends as soon as it has been sent"
        )
        assert not gateway.cancelled
        gateway.accepts.set()
        await expect(page.locator("#stage-note")).to_have_text(CANCELLED)
        assert gateway.cancelled


async def test_another_picture_is_opened_and_masked_while_an_edit_goes_on(opened: Open) -> None:
    gateway = FakeGateway()
    gateway.ends.clear()
    async with opened(gateway) as (page, _):
        await masked(page)
        await edit(page)
        await expect(page.locator("#run")).to_be_visible()
        await open_picture(page, plain(BLUE))
        await expect(page.locator("#picture-note")).not_to_be_empty()
        await expect(page.locator("#stage-note")).to_have_text("Nothing is masked yet.")
        await drag(page, (-60, 0), (60, 0))
        share = await masked_share(page)
        await page.click("#undo")
        await expect(page.locator("#stage-note")).to_have_text("Nothing is masked yet.")
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
        await page.set_input_files("#file", {"name": "b.png", "mimeType": "image/png", "buffer": plain(BLUE)})
        await expect(page.locator("#invitation")).to_be_hidden()
        asked.set()
        await ready(page)
        await expect(page.locator("#stage-note")).to_have_text("Nothing is masked yet.")
        assert await color_at(page, 0, 0) == BLUE
        await page.unroute("**/v1/models")
        await page.reload()
        await finished(page)
        assert await color_at(page, -200, 200) == GREY
