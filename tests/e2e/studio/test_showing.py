"""What the studio page shows of edits, models and the fleet, against a gateway inside the browser."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import Route, expect

from giornata_gateway.views.answers import ErrorDetail
from tests.e2e.studio.easel import color_at, edit, finished, masked, ready
from tests.e2e.studio.gateway import FILL, GREEN, GREY, RED, FakeGateway, Open, fleet, preview

pytestmark = pytest.mark.asyncio(loop_scope="module")

UNFORESEEN = ErrorDetail(code="worker_lost", message="The worker went away.", type="server_error")

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
    one, two = (FILL.model_copy(update={"name": name}) for name in ("one", "two"))
    gateway = FakeGateway(models=[one, two], fleet=fleet("one", "two"))
    async with opened(gateway) as (page, _):
        await masked(page)
        await expect(page.locator("#fleet-note")).to_have_text("2 workers")
        await page.select_option("#model", "two")
        gateway.models, gateway.fleet = [one], fleet("one")
        await expect(page.locator("#model-error")).to_contain_text("two is not served now")
        await expect(page.locator("#model")).to_have_value("two")
        await page.click("#go")
        await expect(page.locator("#model")).to_be_focused()
        assert gateway.forms == []
        gateway.models, gateway.fleet = [one, two], fleet("one", "two")
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
    const opening = indexedDB.open("giornata");
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
    const opening = indexedDB.open("giornata");
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
