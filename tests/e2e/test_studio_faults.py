"""What goes wrong, comes too late or too often on the studio page, against a gateway inside the browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest
from playwright.async_api import Browser, Page, Route, expect

from giornata_gateway.views.answers import ErrorDetail
from tests.e2e.browsing import Watch, visiting
from tests.e2e.easel import CANCELLED, color_at, drag, edit, finished, masked_share, open_picture, ready
from tests.e2e.studio.gateway import ORIGIN, FakeGateway, fleet, plain, preview

pytestmark = pytest.mark.asyncio(loop_scope="module")

Open = Callable[[FakeGateway], AbstractAsyncContextManager[tuple[Page, Watch]]]
GREY = (120, 120, 120)
BLUE, GREEN, RED = (20, 20, 220), (20, 220, 20), (200, 30, 30)
UNFORESEEN = ErrorDetail(code="worker_lost", message="The worker went away.", type="server_error")


@pytest.fixture
def opened(browser: Browser) -> Open:
    return lambda gateway: visiting(browser, ORIGIN, serve=gateway.serve)


async def masked(page: Page) -> None:
    """A grey picture with a stroke along its middle, and a prompt."""
    await open_picture(page, plain(GREY))
    await drag(page, (-60, 0), (60, 0))
    await page.fill("#prompt", "a red star")


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
        "mask_mode": "white",
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
        await expect(page.locator("#stage-note")).to_have_text("Finished. The edit is under “This visit”.")
        await expect(page.locator("#result")).to_be_hidden()
        assert await color_at(page, 0, 200) == BLUE
        await page.get_by_role("button", name="Edit: a red star").click()
        await finished(page)
        assert await color_at(page, -100, 200) == GREY
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
        assert await color_at(page, -100, 200) == GREY


LATE_PREVIEW = """() => {
    const whole = window.createImageBitmap;
    let first = null;
    window.createImageBitmap = async (...given) => {
        const bitmap = await whole(...given);
        if (first === null) await new Promise((resolve) => (first = resolve));
        else setTimeout(first);
        return bitmap;
    };
}"""


async def test_a_preview_is_seen_inside_the_mask_and_none_after_a_later_one(opened: Open) -> None:
    gateway = FakeGateway(events=preview(0, RED) + preview(1, GREEN))
    gateway.ends.clear()
    async with opened(gateway) as (page, _):
        await masked(page)
        drawn = await color_at(page, 0, 0)
        await page.evaluate(LATE_PREVIEW)  # the first is decoded after the second
        await edit(page)
        await page.wait_for_selector("#stage[data-previews='2']")
        assert await color_at(page, 0, 0) == GREEN != drawn
        assert await color_at(page, 0, 200) == GREY
        await expect(page.locator("#stage")).to_have_attribute("data-previews", "2")
        gateway.ends.set()
        await finished(page)


async def test_pixels_are_decoded_for_what_is_seen_and_no_more(opened: Open) -> None:
    gateway = FakeGateway(pictures=3)
    async with opened(gateway) as (page, _):
        await ready(page)
        await page.evaluate("""() => {
            const [whole, close] = [window.createImageBitmap, ImageBitmap.prototype.close];
            window.open_bitmaps = 0;
            window.createImageBitmap = async (...given) => {
                const bitmap = await whole(...given);
                window.open_bitmaps += 1;
                return bitmap;
            };
            ImageBitmap.prototype.close = function () {
                window.open_bitmaps -= 1;
                close.call(this);
            };
        }""")
        await masked(page)
        for edits in (1, 2, 3):
            await edit(page)
            await expect(page.locator("#visit-strip button")).to_have_count(edits)
            await finished(page)
            await page.locator("#film button").nth(2).click()
            await expect(page.locator("#result-note")).to_have_text("Seed 42")
            assert await page.evaluate("window.open_bitmaps") == 3  # what is edited, before and after
            await page.get_by_role("button", name="Mask", exact=True).click()


async def test_a_chosen_model_is_kept_while_its_worker_restarts(opened: Open) -> None:
    gateway = FakeGateway(models=["one", "two"], fleet=fleet("one", "two"))
    async with opened(gateway) as (page, _):
        await masked(page)
        await expect(page.locator("#fleet-note")).to_have_text("2 workers")
        await page.select_option("#model", "two")
        gateway.models, gateway.fleet = ["one"], fleet("one")
        await expect(page.locator("#model-error")).to_contain_text("two is not served now")
        await expect(page.locator("#model")).to_have_value("two")
        await page.click("#go")
        await expect(page.locator("#model")).to_be_focused()
        assert gateway.forms == []
        gateway.models, gateway.fleet = ["one", "two"], fleet("one", "two")
        await expect(page.locator("#model-error")).to_be_hidden()
        await edit(page)
        await finished(page)
        assert b'name="model"\r\n\r\ntwo\r\n' in gateway.forms[0]


async def test_the_fleets_numbers_and_why_there_are_none(opened: Open) -> None:
    gateway = FakeGateway(fleet=fleet("tiny", running=2, waiting=1, queued=3, wait_s=7.25))

    async def refuse(route: Route) -> None:
        error = {"code": "overloaded", "message": "Too many follow the fleet."}
        await route.fulfill(status=429, json={"error": error})

    async with opened(gateway) as (page, watch):
        watch.expected.append("status of 429")
        await expect(page.locator("#pulse-text")).to_have_text("1 worker, 2 running, 7 waiting")
        for name, text in {
            "running": "2 pictures",
            "free": "5 pictures",
            "queued": "3",
            "steps": "2.5",
        }.items():
            await expect(page.locator(f"#fleet-{name}")).to_have_text(text)
        await expect(page.locator("#fleet-wait")).to_have_text(re.compile(r"^about 7\.[23] s$"))
        gateway.fleet = fleet("tiny", waiting=1)
        await expect(page.locator("#pulse-text")).to_have_text("1 worker, 1 waiting")
        await page.route("**/v1/fleet", refuse)
        await expect(page.locator("#pulse-text")).to_have_text("Too many follow the fleet. overloaded")
        await expect(page.locator("#fleet-queued")).to_have_text("unknown")


async def test_a_picture_that_failed_says_why_to_the_keyboard_too(opened: Open) -> None:
    gateway = FakeGateway(pictures=3, failures={1: UNFORESEEN})
    async with opened(gateway) as (page, _):
        await masked(page)
        await edit(page)
        await finished(page)
        failed = page.get_by_role("group", name="Picture 2 failed")
        await expect(failed).to_contain_text("The worker went away.")
        await expect(failed.locator("code")).to_have_text("worker_lost")
        await page.locator("#film button").first.focus()
        await page.keyboard.press("Tab")
        await expect(failed).to_be_focused()


AGED = """(ms) => new Promise((resolve) => {
    const opening = indexedDB.open("giornata", 1);
    opening.onsuccess = () => {
        const store = opening.result.transaction("edits", "readwrite").objectStore("edits");
        const cursor = store.openCursor();
        cursor.onsuccess = () => {
            const { value } = cursor.result;
            cursor.result.update({ ...value, savedMs: value.savedMs - ms }).onsuccess = () => {
                opening.result.close();
                resolve();
            };
        };
    };
})"""
COUNTED = """() => new Promise((resolve) => {
    const opening = indexedDB.open("giornata", 1);
    opening.onsuccess = () => {
        const count = opening.result.transaction("edits").objectStore("edits").count();
        count.onsuccess = () => {
            opening.result.close();
            resolve(count.result);
        };
    };
})"""


async def test_what_is_older_than_a_day_is_deleted_when_the_page_opens(opened: Open) -> None:
    async with opened(FakeGateway()) as (page, _):
        await masked(page)
        await edit(page)
        await finished(page)
        for hours, kept in ((23, 1), (2, 0)):
            await page.evaluate(AGED, hours * 3600 * 1000)
            await page.reload()
            await ready(page)
            assert await page.evaluate(COUNTED) == kept
        await expect(page.locator("#invitation")).to_be_visible()
