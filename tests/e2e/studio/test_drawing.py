"""The mask on the studio page, by mouse, keyboard and touch, from files and from words; a gateway in this process."""

from __future__ import annotations

import base64
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.async_api import Browser, CDPSession, Page, expect

from giornata.wire.errors import NothingFound
from giornata.wire.messages import MaskCard
from giornata_lab.bench.systems.edit_forms import Pixels, box, file, pixels, scene
from tests.e2e.studio.easel import (
    color_at,
    drag,
    edit,
    file_of,
    finished,
    from_text,
    masked,
    masked_share,
    middle,
    open_picture,
    open_sample,
    ready,
)
from tests.e2e.studio.gateway import BLUE, GREY, PAINTER, SIDE, FakeGateway, Open, SentRequest, plain
from tests.unit.prepost.files import ORIENTED

pytestmark = pytest.mark.asyncio(loop_scope="session")

PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
NOTHING = "Nothing is masked yet."


def mask_of(sent: SentRequest) -> NDArray[np.bool_]:
    """The mask that was sent: True where it is to be repainted."""
    assert sent.body.mask is not None
    mask = pixels(sent.body.mask)
    return (mask if mask.ndim == 2 else mask[..., 0]) > 127


async def test_draw_erase_invert_clear_undo_redo(opened: Open) -> None:
    async with opened() as (page, _):
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
        await expect(page.locator("#stage-note")).to_have_text(NOTHING)
        for _step in range(3):
            await page.keyboard.press("Control+z")
        assert await masked_share(page) == quarter
        await page.keyboard.press("Control+z")
        await expect(page.locator("#undo")).to_be_disabled()
        await page.keyboard.press("Control+Shift+z")
        assert await masked_share(page) == quarter
        await page.locator("#prompt").press_sequentially("i b ?")  # typed letters are no shortcuts
        assert await masked_share(page) == quarter
        await expect(page.locator("[data-tool=rectangle]")).to_have_attribute("aria-pressed", "true")


async def test_the_other_button_erases_the_brush_grows_with_the_picture_and_the_view_moves(
    opened: Open,
) -> None:
    async with opened() as (page, _):
        await open_picture(page, file(scene(200, 200)))
        await expect(page.locator("#brush-size-text")).to_have_text("48 px")
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
        size = int((await page.inner_text("#brush-size-text")).split()[0])
        await open_picture(page, file(scene(1536, 1200)))
        await expect(page.locator("#brush-size-text")).to_have_text(f"{2 * size} px")
        fitted = await page.inner_text("#zoom-text")
        x, y = await middle(page)
        await page.mouse.move(x + 100, y)
        await page.mouse.wheel(0, -400)
        await expect(page.locator("#zoom-text")).not_to_have_text(fitted)
        await page.click("#zoom-full")
        await expect(page.locator("#zoom-text")).to_have_text("100 %")
        await page.click("[data-tool=hand]")
        before = await color_at(page, 0, 0)
        await drag(page, (0, 0), (-150, -60))
        assert await color_at(page, 0, 0) != before
        assert await masked_share(page) == 0  # the hand paints nothing
        await page.click("#zoom-fit")
        await expect(page.locator("#zoom-text")).to_have_text(fitted)


async def test_a_whole_edit_by_keyboard_alone(opened: Open) -> None:
    async with opened() as (page, _):
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
        await page.keyboard.press("?")
        await expect(page.locator("#help")).to_be_visible()
        await page.keyboard.press("Escape")
        await page.keyboard.press("Control+Enter")
        await finished(page)
        await page.locator("#stage").focus()
        edge = int(await page.input_value("#compare"))
        await page.keyboard.press("ArrowRight")
        await expect(page.locator("#compare")).to_have_value(str(edge + 2))
        await page.keyboard.press("v")
        await expect(page.locator("#result")).to_be_hidden()


async def test_a_lasso_masks_what_it_surrounds(opened: Open) -> None:
    async with opened() as (page, _):
        await open_picture(page, plain(GREY))
        await page.click("[data-tool=lasso]")
        x, y = await middle(page)
        await page.mouse.move(x - 100, y - 100)
        await page.mouse.down()
        for dx, dy in ((100, -100), (100, 100), (-100, 100)):
            await page.mouse.move(x + dx, y + dy)
        await page.mouse.up()
        scale = float((await page.inner_text("#zoom-text")).split()[0]) / 100
        whole = 100 * (200 / scale / SIDE) ** 2
        assert await masked_share(page) == pytest.approx(whole, rel=0.1)
        await page.click("[data-action=erase]")
        await page.locator("#stage").focus()
        await page.keyboard.press(" ")
        for key in ("ArrowRight", "ArrowDown", "ArrowLeft"):
            for _step in range(3):
                await page.keyboard.press(f"Shift+{key}")
        await page.keyboard.press(" ")
        await expect(page.locator("#announcer")).to_have_text("Outline closed")
        cut = await masked_share(page)
        assert 0 < cut < whole * 0.99
        await page.keyboard.press("Control+z")
        assert await masked_share(page) > cut


async def touch(cdp: CDPSession, kind: str, *points: tuple[float, float]) -> None:
    touched = [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)]
    await cdp.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": touched})


async def strokes(page: Page, *path: list[tuple[float, float]]) -> None:
    """Fingers that go down together, move along their points, and go up."""
    x, y = await middle(page)
    cdp = await page.context.new_cdp_session(page)
    places = [[(x + dx, y + dy) for dx, dy in moment] for moment in path]
    await touch(cdp, "touchStart", *places[0])
    for moment in places[1:]:
        await touch(cdp, "touchMove", *moment)
    await touch(cdp, "touchEnd")


async def test_on_a_phone_one_finger_paints_two_pinch_and_progress_and_result_are_in_sight(
    opened: Open,
) -> None:
    gateway = FakeGateway()
    gateway.ends.clear()
    async with opened(gateway, **PHONE) as (page, _):
        await open_picture(page, plain(GREY))
        await page.locator("#stage").scroll_into_view_if_needed()
        await strokes(page, [(-60, 0)], [(-20, 10)], [(40, 20)])
        share = await masked_share(page)
        assert share > 2
        zoom = await page.inner_text("#zoom-text")
        await strokes(page, [(-20, 80), (20, 80)], [(-40, 80), (40, 80)], [(-80, 80), (80, 80)])
        await expect(page.locator("#zoom-text")).not_to_have_text(zoom)
        assert await masked_share(page) == share  # a pinch leaves no paint
        await page.tap("#zoom-fit")
        await page.fill("#prompt", "a red star")
        await page.tap("#go")
        await expect(page.locator("#run")).to_be_in_viewport(ratio=1)
        await expect(page.locator("#stage")).to_be_in_viewport(ratio=1)
        await page.locator("#fleet-workers").scroll_into_view_if_needed()
        await expect(page.locator("#stage")).not_to_be_in_viewport()
        await expect(page.locator("#progress")).to_be_in_viewport(ratio=1)
        await expect(page.locator("#cancel")).to_be_in_viewport(ratio=1)
        gateway.ends.set()
        await finished(page)
        await expect(page.locator("#stage")).to_be_in_viewport(ratio=1)
        await expect(page.locator("#download")).to_be_in_viewport(ratio=1)
        assert await page.evaluate("document.documentElement.scrollWidth") == PHONE["viewport"]["width"]
    assert 100 * mask_of(gateway.sent[0]).mean() == pytest.approx(share, abs=0.6), "as much as was told"


HAND_OVER = """([kind, text]) => {
    const bytes = Uint8Array.from(atob(text), (byte) => byte.charCodeAt(0));
    const carried = new DataTransfer();
    carried.items.add(new File([bytes], "from-elsewhere.png", { type: "image/png" }));
    const event = kind === "paste"
        ? new ClipboardEvent("paste", { clipboardData: carried, bubbles: true, cancelable: true })
        : new DragEvent(kind, { dataTransfer: carried, bubbles: true, cancelable: true });
    document.getElementById("stage").dispatchEvent(event);
}"""


async def load_mask(page: Page, mask: Pixels) -> None:
    await page.set_input_files("#mask-file", file_of(file(mask)))


async def test_pictures_and_masks_come_from_files_or_by_hand_and_what_is_none_is_refused(
    opened: Open,
) -> None:
    gateway = FakeGateway()
    half = np.zeros((64, 64), np.uint8)
    half[:, 32:] = 255
    cut = np.full((SIDE, SIDE, 4), 255, np.uint8)
    cut[: SIDE // 2, : SIDE // 2, 3] = 0
    async with opened(gateway) as (page, _):
        await ready(page)
        await page.set_input_files("#file", file_of(b"no picture"))
        await expect(page.locator("#picture-error")).to_contain_text("cannot be read as a picture")
        await expect(page.locator("#picture-error code")).to_have_text("picture_unreadable")
        await load_mask(page, half)
        await expect(page.locator("#picture-error")).to_contain_text("Choose a picture first.")
        await page.evaluate(HAND_OVER, ["dragenter", ""])
        await expect(page.locator("#veil")).to_be_visible()
        for kind, side in (("drop", 60), ("paste", 70)):
            await page.evaluate(HAND_OVER, [kind, base64.b64encode(plain(GREY, side)).decode()])
            await expect(page.locator("#veil")).to_be_hidden()
            await expect(page.locator("#picture-note")).to_contain_text(str(side))
        await expect(page.locator("#picture-error")).to_be_hidden()

        await open_picture(page, plain(GREY))
        await load_mask(page, half)
        await expect(page.locator("#stage-note")).to_contain_text("50 %")
        quarter = np.where(np.arange(64) >= 48, half, 0).astype(np.uint8)
        await load_mask(page, np.dstack([half, half, half, 255 - quarter]))  # what is transparent counts
        await expect(page.locator("#stage-note")).to_contain_text("25 %")
        await load_mask(page, half[:, :40])
        await expect(page.locator("#picture-error code")).to_have_text("mask_size_mismatch")
        await page.click("#undo")
        await page.click("#undo")
        await expect(page.locator("#stage-note")).to_have_text(NOTHING)

        await open_picture(page, file(cut))  # its transparent pixels are its mask
        await expect(page.locator("#picture-note")).to_contain_text("transparent parts masked")
        assert await masked_share(page) == 25
        await page.click("#undo")
        await expect(page.locator("#stage-note")).to_have_text(NOTHING)
        await page.click("#redo")
        await edit(page, prompt="a red star")
        await finished(page)
        assert np.array_equal(mask_of(gateway.sent[0]), cut[..., 3] < 128)
        await open_picture(page, plain(GREY))
        await expect(page.locator("#stage-note")).to_have_text(NOTHING)


async def test_the_canvas_is_extended_by_what_is_to_be_painted(opened: Open) -> None:
    gateway = FakeGateway()
    async with opened(gateway) as (page, _):
        await ready(page)
        await page.click("#extend-section summary")
        await page.click("#extend")
        await expect(page.locator("#picture-error")).to_contain_text("Choose a picture first.")
        await open_picture(page, plain(BLUE))
        await page.click("[data-tool=rectangle]")
        await drag(page, (-20, -20), (20, 20))
        inner = await masked_share(page)
        await page.click("#extend")
        await expect(page.locator("#picture-error")).to_contain_text("at one side at least")
        await page.fill("#extend-left", "1.5")
        await page.click("#extend")
        await expect(page.locator("#picture-error code")).to_have_text("side_invalid")
        await page.fill("#extend-left", "64")
        await page.fill("#extend-bottom", "32")
        await page.click("#extend")
        await expect(page.locator("#picture-note")).to_have_text(re.compile(f"^{SIDE + 64} . {SIDE + 32}$"))
        await edit(page, prompt="the sea")
        await finished(page)
    [sent] = gateway.sent
    mask, image = mask_of(sent), pixels(sent.body.picture)
    assert mask.shape == image.shape[:2] == (SIDE + 32, SIDE + 64)
    assert mask[:, :64].all()
    assert mask[SIDE:].all()
    assert 100 * mask[:SIDE, 64:].mean() == pytest.approx(inner, abs=0.1)
    assert (image[..., :3] == BLUE).all(), "the edge goes on where the picture ended"


CARD = MaskCard(name="seer", threshold=0.5)


async def test_what_words_name_becomes_the_mask_and_is_edited_like_one_that_was_drawn(opened: Open) -> None:
    gateway = FakeGateway(masks={"tiny": CARD}, found=(file(box(SIDE, SIDE)),))
    async with opened(gateway) as (page, watch):
        watch.expected.append("status of 422")
        await ready(page)
        await page.click("#find")
        await expect(page.locator("#words-error")).to_have_text("Choose a picture first.")
        await open_picture(page, plain(GREY))
        await page.click("#find")
        await expect(page.locator("#words-error")).to_have_text("Say what to edit.")
        await drag(page, (-30, 0), (30, 0))
        drawn = await masked_share(page)
        gateway.refusals["/v1/masks"] = NothingFound("The words name nothing.", field="prompt")
        await page.fill("#words", "a dog")
        await expect(page.locator("#words-error")).to_be_hidden()
        await page.click("#find")
        await expect(page.locator("#words-error code")).to_have_text("nothing_found")
        await expect(page.locator("#prompt-error")).to_be_hidden()
        assert await masked_share(page) == drawn, "what was drawn can be edited all the same"
        gateway.refusals.clear()
        await page.fill("#words", "the red circle")
        await page.press("#words", "Enter")
        await expect(page.locator("#stage-note")).to_contain_text("6.3 % of the picture is masked.")
        await expect(page.locator("#words-error")).to_be_hidden()
        assert drawn != 6.3
        await page.click("#undo")
        assert await masked_share(page) == drawn
        await page.click("#redo")
        await edit(page, prompt="a blue star")
        await finished(page)
        gateway.accepts.clear()
        await open_picture(page, plain(GREY))
        await page.click("#find")
        await expect(page.locator("#find")).to_be_disabled()
        await open_picture(page, plain(GREY), "other.png")
        gateway.accepts.set()
        await expect(page.locator("#find")).to_be_enabled()
        await expect(page.locator("#stage-note")).to_have_text(NOTHING)  # it came too late
    (asked, _), (sent,) = gateway.named, gateway.sent
    assert asked.fields == {"prompt": "the red circle"}
    assert asked.body.image == plain(GREY)
    assert "mask_prompt" not in sent.fields, "what was found is sent as what was drawn is"
    assert np.array_equal(mask_of(sent), box(SIDE, SIDE) > 0)


async def test_a_click_takes_or_leaves_one_of_what_was_found(opened: Open) -> None:
    one, other = np.zeros((SIDE, SIDE), np.uint8), np.zeros((SIDE, SIDE), np.uint8)
    one[64:192, 32:96] = other[64:192, 160:224] = 255
    gateway = FakeGateway(masks={"tiny": CARD}, found=(file(one), file(other)))
    async with opened(gateway) as (page, _):
        await open_picture(page, plain(GREY))
        await page.click("#pick")
        x, y = await middle(page)
        await page.mouse.click(x, y)
        await expect(page.locator("#words-error")).to_contain_text("press Find")
        await page.fill("#words", "shoes")
        await page.press("#words", "Enter")
        await expect(page.locator("#announcer")).to_have_text("Masked: shoes; 2 found")
        assert await masked_share(page) == 25
        scale = float((await page.inner_text("#zoom-text")).split()[0]) / 100
        left, right = x - 64 * scale, x + 64 * scale
        await page.mouse.click(left, y)
        await expect(page.locator("#stage-note")).to_contain_text("13 %")
        await page.mouse.click(x, y)
        await expect(page.locator("#announcer")).to_have_text("Nothing that was found lies here")
        await page.mouse.click(right, y)
        await expect(page.locator("#stage-note")).to_have_text(NOTHING)
        await page.mouse.click(right, y)
        await edit(page, prompt="a red boot")
        await finished(page)
        assert np.array_equal(mask_of(gateway.sent[0]), other > 0)


async def test_from_text_there_is_nothing_to_mask(opened: Open) -> None:
    gateway = FakeGateway(models=[PAINTER], masks={PAINTER.name: CARD})
    async with opened(gateway) as (page, _):
        await masked(page)
        share = await masked_share(page)
        await expect(page.locator("#words")).to_be_visible()
        await from_text(page)
        tools = "[data-tool=brush], [data-tool=lasso], #brush-size, #invert, #load-mask, #undo, #words"
        for tool in tools.split(", "):
            await expect(page.locator(tool)).to_be_hidden()
        await expect(page.locator("#zoom-in")).to_be_visible()
        await expect(page.locator("#stage-note")).to_be_empty()
        assert await color_at(page, 0, 0) == GREY, "no mask is seen"
        await drag(page, (-60, 60), (60, 60))
        await page.keyboard.press("i")
        await page.get_by_role("button", name="From a picture").click()
        assert await masked_share(page) == share
        await page.reload()
        await from_text(page)
        await expect(page.get_by_role("heading", name="The picture appears here")).to_be_visible()
        await expect(page.get_by_role("heading", name="Drop a picture here")).to_be_hidden()
        await masked(page)  # who opens a picture wants to edit it
        await expect(page.locator("#strength")).to_be_visible()
        await page.click("#go")
        await finished(page)
        await expect(page.locator("#compare-label")).to_be_visible()
    [sent] = gateway.sent
    assert sent.body.mask
    assert "size" not in sent.fields


SIZES = """async (files) => Promise.all(files.map(async (file) => {
  const blob = new Blob([Uint8Array.from(atob(file), (byte) => byte.charCodeAt(0))]);
  const { width, height } = await createImageBitmap(blob);
  const image = new Image();
  image.src = URL.createObjectURL(blob);
  await image.decode();
  return [width, height, image.naturalWidth, image.naturalHeight];
}))"""
"""Sizes of files as a canvas gets them, which is what the studio edits, and as a page shows them."""


async def test_chromium_turns_what_the_service_turns_so_that_masks_fit(browser: Browser) -> None:
    page = await browser.new_page()
    sizes = await page.evaluate(SIZES, [base64.b64encode(data).decode() for data, _ in ORIENTED.values()])
    await page.close()
    shown = {name: tuple(size) for name, size in zip(ORIENTED, sizes, strict=True)}
    assert shown == {name: (16, 24) * 2 if turned else (24, 16) * 2 for name, (_, turned) in ORIENTED.items()}
