"""What the studio page shows of edits and keeps of them; a gateway in this process."""

from __future__ import annotations

import numpy as np
import pytest
from playwright.async_api import expect

from giornata_gateway.views.jobs import ErrorDetail
from giornata_lab.bench.systems.edit_forms import pixels
from tests.e2e.studio.easel import color_at, drag, edit, finished, masked, ready
from tests.e2e.studio.gateway import GREEN, GREY, RED, SIDE, FakeGateway, Open, preview

pytestmark = pytest.mark.asyncio(loop_scope="session")

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


async def test_a_result_is_compared_at_the_masks_edge_and_becomes_the_next_input(opened: Open) -> None:
    gateway = FakeGateway(pictures=2)
    async with opened(gateway) as (page, _):
        await masked(page)
        await edit(page)
        await finished(page)
        slider, film = page.locator("#compare"), page.locator("#film button")
        assert await color_at(page, -50, 0) == RED, "all of the mask shows what was painted"
        assert await color_at(page, -200, 0) == GREY
        mask = gateway.sent[0].body.mask
        assert mask is not None
        left = int(np.nonzero(pixels(mask)[..., 0] > 127)[1].min())
        await expect(slider).to_have_value(str(round(100 * left / SIDE)))
        await slider.fill("70")
        await film.nth(1).click()
        await expect(page.locator("#result-note")).to_have_text("Seed 41")
        await expect(film.nth(1)).to_have_attribute("aria-pressed", "true")
        await expect(slider).to_have_value("70")  # pictures of one edit are compared at one place
        await slider.focus()
        for key, share, seen in (("Home", 0, RED), ("End", 100, GREY)):
            await page.keyboard.press(key)
            await expect(slider).to_have_attribute("aria-valuetext", f"{share} % original")
            assert await color_at(page, 100, 50) == seen
        await drag(page, (0, 0), (-100, 0))
        await expect(slider).not_to_have_value("100")
        await page.click("[data-tool=rectangle]")  # a person with a brush wants to see the mask
        await expect(page.locator("#result")).to_be_hidden()
        await page.get_by_role("button", name="Result", exact=True).click()
        await expect(page.locator("#result")).to_be_visible()
        await page.click("#invert")
        await expect(page.locator("#result")).to_be_hidden()
        await page.get_by_role("button", name="Edit: a red star").click()
        await finished(page)
        await page.click("#use-result")
        await expect(page.locator("#stage-note")).to_have_text("Nothing is masked yet.")
        await expect(page.locator("#result")).to_be_hidden()
        assert await color_at(page, -200, 0) == RED


async def test_pixels_are_decoded_for_what_is_seen_and_no_more(opened: Open) -> None:
    async with opened(FakeGateway(pictures=3)) as (page, _):
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
        for edits in (1, 2):
            await edit(page)
            await finished(page, edits)
            await page.locator("#film button").nth(2).click()
            await expect(page.locator("#result-note")).to_have_text("Seed 42")
            assert await page.evaluate("window.open_bitmaps") == 3  # what is edited, before and after
            await page.get_by_role("button", name="Mask", exact=True).click()


async def test_pictures_of_an_edit_are_kept_or_discarded_and_one_that_failed_says_why(opened: Open) -> None:
    async with opened(FakeGateway(pictures=4, failures={1: UNFORESEEN})) as (page, _):
        await masked(page)
        await edit(page)
        await finished(page)
        note, film = page.locator("#result-note"), page.locator("#film button")
        failed = page.get_by_role("group", name="Picture 2 failed")
        await expect(failed).to_contain_text("The worker went away. worker_lost")
        await film.first.focus()
        await page.keyboard.press("Tab")
        await expect(failed).to_be_focused()
        await page.locator("#stage").focus()
        await page.keyboard.press("ArrowDown")
        await expect(note).to_have_text("Seed 42")
        await page.keyboard.press("ArrowUp")
        await page.keyboard.press("ArrowUp")
        await expect(note).to_have_text("Seed 43")
        await page.click("#discard")
        await expect(note).to_have_text("Seed 42")
        await expect(film).to_have_count(2)
        await page.locator("#stage").focus()
        await page.keyboard.press("ArrowUp")
        await expect(note).to_have_text("Seed 40")
        await page.click("#keep")
        await expect(page.locator("#decide")).to_be_hidden()
        await expect(page.locator("#film")).to_be_hidden()
        await expect(page.locator("#download")).to_be_focused()
        await page.reload()
        await finished(page)  # without another look at the gateway
        await expect(note).to_have_text("Seed 40")
        await expect(page.locator("#film")).to_be_hidden()


async def test_earlier_edits_and_prompts_outlive_the_page_until_they_are_cleared(opened: Open) -> None:
    async with opened(FakeGateway(pictures=2, failures={1: UNFORESEEN})) as (page, _):
        page.on("dialog", lambda dialog: dialog.accept())
        await masked(page)
        for count, prompt in enumerate(("a red star", "a blue boat"), 1):
            await edit(page, prompt=prompt)
            await finished(page, count)
        await page.evaluate("sessionStorage.clear()")  # as in another tab
        await page.reload()
        await ready(page)
        await expect(page.locator("#invitation")).to_be_visible()
        strip = page.locator("#visit-strip button")
        await expect(strip).to_have_count(2)
        await expect(strip.first).to_have_attribute("aria-label", "Edit: a blue boat")
        await strip.nth(1).click()
        await finished(page)
        assert await color_at(page, 0, 0) == RED
        await expect(page.get_by_role("group", name="Picture 2 failed")).to_contain_text("worker_lost")
        await page.select_option("#prompt-history", "a blue boat")
        await expect(page.locator("#prompt")).to_have_value("a blue boat")
        await page.click("#use-result")
        await page.click("#clear-history")
        await expect(page.locator("#visit")).to_be_hidden()
        await expect(page.locator("#prompt-history")).to_be_hidden()
        await page.reload()
        await ready(page)
        await expect(page.locator("#visit")).to_be_hidden()
        await expect(page.locator("#invitation")).to_be_visible()
