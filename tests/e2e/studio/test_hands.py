"""The studio by mouse, keyboard and touch: whatever one hand does, the others can."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.async_api import CDPSession, Page, expect

from tests.e2e.pictures import file, scene
from tests.e2e.studio.browsing import screenshot
from tests.e2e.studio.easel import (
    Visit,
    drag,
    edit,
    finished,
    masked_share,
    middle,
    open_picture,
    open_sample,
    ready,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


async def test_draw_erase_invert_clear_undo_redo(visit: Visit) -> None:
    async with visit() as (page, _):
        await open_picture(page, file(scene(200, 200)))
        await page.click("[data-tool=rectangle]")
        await drag(page, (-200, -200), (0, 0))
        quarter = await masked_share(page)
        assert 5 < quarter < 30
        await page.click("[data-action=erase]")
        await drag(page, (-100, -200), (0, 0))
        assert abs(await masked_share(page) - quarter / 2) < 1
        await page.click("#undo")
        assert await masked_share(page) == quarter
        await page.click("#redo")
        assert await masked_share(page) < quarter
        await page.click("#invert")
        assert await masked_share(page) > 80
        await page.click("#clear")
        await expect(page.locator("#stage-note")).to_have_text("Nothing is masked yet.")
        for _step in range(3):
            await page.keyboard.press("Control+z")
        assert await masked_share(page) == quarter
        await page.keyboard.press("Control+z")
        await expect(page.locator("#undo")).to_be_disabled()
        await page.keyboard.press("Control+Shift+z")
        assert await masked_share(page) == quarter


async def test_the_other_button_erases_and_a_larger_brush_paints_more(visit: Visit) -> None:
    async with visit() as (page, _):
        await open_picture(page, file(scene(200, 200)))
        await drag(page, (-100, 0), (100, 0))
        thin = await masked_share(page)
        await page.click("#undo")
        await page.locator("#brush-size").fill("75")
        await drag(page, (-100, 0), (100, 0))
        thick = await masked_share(page)
        assert thick > 1.5 * thin
        x, y = await middle(page)
        await page.mouse.move(x, y)
        await page.mouse.down(button="right")
        await page.mouse.up(button="right")
        assert await masked_share(page) < thick


async def test_zoom_and_pan_by_wheel_and_buttons(visit: Visit) -> None:
    async with visit() as (page, _):
        await open_picture(page, file(scene(800, 800)))
        fitted = await page.inner_text("#zoom-text")
        x, y = await middle(page)
        await page.mouse.move(x + 100, y)
        await page.mouse.wheel(0, -400)
        await expect(page.locator("#zoom-text")).not_to_have_text(fitted)
        await page.click("#zoom-full")
        await expect(page.locator("#zoom-text")).to_have_text("100 %")
        await page.click("[data-tool=hand]")
        before = await page.locator("#stage").screenshot()
        await drag(page, (0, 0), (-150, -60))
        assert await page.locator("#stage").screenshot() != before
        assert await masked_share(page) == 0  # the hand paints nothing
        await page.click("#zoom-fit")
        await expect(page.locator("#zoom-text")).to_have_text(fitted)


async def test_a_whole_edit_by_keyboard_alone(visit: Visit) -> None:
    async with visit() as (page, _):
        await open_sample(page, "Cat")
        await page.locator("#stage").focus()
        await page.keyboard.press("Delete")
        await page.keyboard.down(" ")
        for _step in range(5):
            await page.keyboard.press("Shift+ArrowRight")
        await page.keyboard.up(" ")
        line = await masked_share(page)
        assert line > 1
        await expect(page.locator("#announcer")).to_have_text(re.compile(r"^\d+, \d+$"))
        await page.keyboard.press("r")
        await expect(page.locator("[data-tool=rectangle]")).to_have_attribute("aria-pressed", "true")
        await page.keyboard.press(" ")
        for key in ("Shift+ArrowDown", "Shift+ArrowLeft"):
            for _step in range(6):
                await page.keyboard.press(key)
        await page.keyboard.press(" ")
        assert await masked_share(page) > line
        await page.keyboard.press("+")
        await page.keyboard.press("?")
        await expect(page.locator("#help")).to_be_visible()
        await screenshot(page, "help")
        await page.keyboard.press("Escape")
        await page.locator("#steps").fill("2")
        await page.keyboard.press("Control+Enter")
        await finished(page)
        await page.locator("#stage").focus()
        edge = int(await page.input_value("#compare"))
        await page.keyboard.press("ArrowRight")
        await expect(page.locator("#compare")).to_have_value(str(edge + 2))
        await page.keyboard.press("v")
        await expect(page.locator("#result")).to_be_hidden()


async def test_letters_typed_into_the_prompt_are_no_shortcuts(visit: Visit) -> None:
    async with visit() as (page, _):
        await open_sample(page)
        share = await masked_share(page)
        await page.locator("#prompt").press_sequentially("i paint a big red hat")
        assert await masked_share(page) == share
        await expect(page.locator("[data-tool=brush]")).to_have_attribute("aria-pressed", "true")


HAND_OVER = """([kind, bytes]) => {
    const file = new File([new Uint8Array(bytes)], "from-elsewhere.png", { type: "image/png" });
    const carried = new DataTransfer();
    carried.items.add(file);
    const event = kind === "paste"
        ? new ClipboardEvent("paste", { clipboardData: carried, bubbles: true, cancelable: true })
        : new DragEvent(kind, { dataTransfer: carried, bubbles: true, cancelable: true });
    document.getElementById("stage").dispatchEvent(event);
}"""


async def test_a_picture_is_pasted_or_dropped(visit: Visit) -> None:
    async with visit() as (page, _):
        await ready(page)
        await page.evaluate(HAND_OVER, ["dragenter", []])
        await expect(page.locator("#veil")).to_be_visible()
        await page.evaluate(HAND_OVER, ["drop", list(file(scene(60, 40)))])
        await expect(page.locator("#veil")).to_be_hidden()
        await expect(page.locator("#picture-note")).to_contain_text("60")
        await page.evaluate(HAND_OVER, ["paste", list(file(scene(70, 40)))])
        await expect(page.locator("#picture-note")).to_contain_text("70")


async def test_whoever_takes_a_brush_sees_the_mask_again(visit: Visit) -> None:
    async with visit() as (page, _):
        await open_sample(page)
        await edit(page, steps=2)
        await finished(page)
        await page.click("[data-tool=rectangle]")
        await expect(page.locator("#result")).to_be_hidden()
        await page.get_by_role("button", name="Result", exact=True).click()
        await expect(page.locator("#result")).to_be_visible()
        await page.click("#invert")
        await expect(page.locator("#result")).to_be_hidden()


async def touch(cdp: CDPSession, kind: str, *points: tuple[float, float]) -> None:
    await cdp.send(
        "Input.dispatchTouchEvent",
        {"type": kind, "touchPoints": [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)]},
    )


async def strokes(page: Page, *path: list[tuple[float, float]]) -> None:
    """Fingers that go down together, move along their points, and go up."""
    x, y = await middle(page)
    cdp = await page.context.new_cdp_session(page)
    places = [[(x + dx, y + dy) for dx, dy in moment] for moment in path]
    await touch(cdp, "touchStart", *places[0])
    for moment in places[1:]:
        await touch(cdp, "touchMove", *moment)
    await touch(cdp, "touchEnd")


async def test_one_finger_paints_two_pinch(visit: Visit) -> None:
    async with visit(**PHONE) as (page, _):
        await open_picture(page, file(scene(200, 200)))
        await page.locator("#stage").scroll_into_view_if_needed()
        await strokes(page, [(-60, 0)], [(-20, 10)], [(40, 20)])
        share = await masked_share(page)
        assert share > 2
        zoom = await page.inner_text("#zoom-text")
        await strokes(page, [(-20, 0), (20, 0)], [(-40, 0), (40, 0)], [(-80, 0), (80, 0)])
        await expect(page.locator("#zoom-text")).not_to_have_text(zoom)
        assert await masked_share(page) == share  # a pinch leaves no paint
        await page.tap("#zoom-fit")
        await screenshot(page, "mobile")


async def test_nothing_is_wider_than_a_phone(visit: Visit) -> None:
    async with visit(**PHONE) as (page, _):
        await open_sample(page)
        for name in ("mobile", "mobile-panel"):
            width = await page.evaluate("document.documentElement.scrollWidth")
            assert width == 360
            if name == "mobile-panel":
                await page.locator("#go").scroll_into_view_if_needed()
                await screenshot(page, name)
            await page.locator("#fleet-workers").scroll_into_view_if_needed()
