"""What a newcomer meets on the studio page, and the tools of other canvases; a gateway inside the browser."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from playwright.async_api import Browser, Page, expect

from giornata.wire.masks import MaskCard
from giornata_gateway.views.answers import ErrorDetail
from tests.e2e.pictures import Pixels, file, pixels
from tests.e2e.studio.browsing import visiting
from tests.e2e.studio.easel import (
    color_at,
    drag,
    edit,
    finished,
    masked,
    masked_share,
    middle,
    open_picture,
    ready,
)
from tests.e2e.studio.gateway import (
    BLUE,
    GREY,
    ORIGIN,
    PAINTER,
    RED,
    SIDE,
    FakeGateway,
    Open,
    plain,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def part(form: bytes, name: str) -> bytes:
    """A file or a field of a multipart body."""
    boundary = form.split(b"\r\n", 1)[0]
    [found] = [one for one in form.split(boundary) if b'name="%s"' % name.encode() in one]
    return found.split(b"\r\n\r\n", 1)[1].removesuffix(b"\r\n")


def sent_mask(form: bytes) -> NDArray[np.bool_]:
    """The mask that was sent: True where it is to be repainted."""
    return np.asarray(Image.open(io.BytesIO(part(form, "mask"))).convert("L")) > 127


async def load_mask(page: Page, mask: Pixels) -> None:
    await page.set_input_files("#mask-file", {"name": "m.png", "mimeType": "image/png", "buffer": file(mask)})


async def test_the_result_opens_with_the_line_at_the_masks_edge(opened: Open) -> None:
    gateway = FakeGateway(pictures=2)
    async with opened(gateway) as (page, _):
        await masked(page)
        await edit(page)
        await finished(page)
        assert await color_at(page, -50, 0) == RED, "all of the mask shows what was painted"
        assert await color_at(page, -200, 0) == GREY
        left = int(np.nonzero(sent_mask(gateway.forms[0]))[1].min())
        edge = str(round(100 * left / SIDE))
        await expect(page.locator("#compare")).to_have_value(edge)
        await page.locator("#compare").fill("70")
        await page.locator("#film button").nth(1).click()
        await expect(page.locator("#result-note")).to_have_text("Seed 41")
        await expect(page.locator("#compare")).to_have_value(
            "70"
        )  # pictures of one edit are compared at one place


async def test_on_a_phone_progress_and_result_are_in_sight(browser: Browser) -> None:
    gateway = FakeGateway()
    gateway.ends.clear()
    async with visiting(browser, ORIGIN, serve=gateway.serve, **PHONE) as (page, _):
        await open_picture(page, plain(GREY))
        await page.tap("#invert")
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


async def test_a_large_photo_is_cropped_to_the_mask_unless_a_person_says_otherwise(opened: Open) -> None:
    gateway = FakeGateway()
    large = file(np.full((1200, 1600, 3), GREY, np.uint8))
    async with opened(gateway) as (page, _):
        await masked(page)
        await expect(page.locator("#crop")).not_to_be_checked()
        await expect(page.locator("#brush-size-text")).to_have_text("48 px")
        await open_picture(page, large)
        await expect(page.locator("#crop")).to_be_checked()
        await expect(page.locator("#brush-size-text")).to_have_text("100 px")
        await drag(page, (-60, 0), (60, 0))
        await edit(page)
        await finished(page)
        assert part(gateway.forms[0], "padding_mask_crop") == b"100"
        await page.uncheck("#crop")
        await open_picture(page, large, "another.png")
        await expect(page.locator("#picture-note")).to_contain_text("1600")
        await expect(page.locator("#stage-note")).to_have_text("Nothing is masked yet.")
        await expect(page.locator("#crop")).not_to_be_checked()
        await drag(page, (-60, 0), (60, 0))
        await edit(page)
        await expect(page.locator("#visit-strip button")).to_have_count(2)
        assert b"padding_mask_crop" not in gateway.forms[1]
        await open_picture(page, plain(GREY))
        await expect(page.locator("#brush-size-text")).to_have_text("48 px")


async def test_what_an_edit_lacks_is_no_longer_told_once_it_is_there(opened: Open) -> None:
    async with opened(FakeGateway()) as (page, _):
        await ready(page)
        await page.fill("#prompt", "a red star")
        await page.click("#go")
        await expect(page.locator("#edit-error")).to_have_text("Choose a picture first.")
        await open_picture(page, plain(GREY))
        await expect(page.locator("#edit-error")).to_be_hidden()
        await page.click("#go")
        await expect(page.locator("#edit-error")).to_have_text("Paint over what is to change first.")
        await drag(page, (-60, 0), (60, 0))
        await expect(page.locator("#edit-error")).to_be_hidden()


async def test_transparent_pixels_are_the_mask_of_a_picture_that_has_any(opened: Open) -> None:
    gateway = FakeGateway()
    cut = np.full((SIDE, SIDE, 4), 255, np.uint8)
    cut[: SIDE // 2, : SIDE // 2, 3] = 0
    async with opened(gateway) as (page, _):
        await open_picture(page, file(cut))
        await expect(page.locator("#picture-note")).to_contain_text("transparent parts masked")
        assert await masked_share(page) == 25
        await page.click("#undo")
        await expect(page.locator("#stage-note")).to_have_text("Nothing is masked yet.")
        await page.click("#redo")
        await edit(page, prompt="a red star")
        await finished(page)
        assert np.array_equal(sent_mask(gateway.forms[0]), cut[..., 3] < 128)
        await open_picture(page, plain(GREY))
        await expect(page.locator("#stage-note")).to_have_text("Nothing is masked yet.")


async def test_earlier_edits_and_prompts_outlive_the_page_until_they_are_cleared(opened: Open) -> None:
    gateway = FakeGateway(
        pictures=2, failures={1: ErrorDetail(code="worker_lost", message="Lost.", type="server_error")}
    )
    async with opened(gateway) as (page, _):
        page.on("dialog", lambda dialog: dialog.accept())
        await masked(page)
        for count, prompt in enumerate(("a red star", "a blue boat"), 1):
            await edit(page, prompt=prompt)
            await expect(page.locator("#visit-strip button")).to_have_count(count)
        await finished(page)
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
        await expect(page.get_by_role("group", name="Picture 2 failed")).to_contain_text("Lost. worker_lost")
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


async def test_the_browser_keeps_the_latest_edits_and_no_more(opened: Open) -> None:
    async with opened(FakeGateway()) as (page, _):
        await ready(page)
        kept = await page.evaluate("""async () => {
            const { keep, kept } = await import("./studio/js/saved.js");
            const edit = (id, bytes, days = 0) => ({
                id, prompt: id, bounds: null, shown: 0, savedMs: Date.now() - days * 86400e3 + Number(id.slice(1)),
                before: { blob: null }, pictures: [{ seed: 1, blob: new Blob([new Uint8Array(bytes)]) }],
            });
            const ids = async () => (await kept()).map(({ id }) => id);
            for (let i = 10; i < 24; i++) await keep(edit(`e${i}`, 1000));
            const many = await ids();
            await keep(edit("e50", 200e6));
            const large = await ids();
            await keep(edit("e60", 100e6));
            await keep(edit("e09", 10, 31));
            return { many, large, larger: await ids() };
        }""")
    assert kept["many"] == [f"e{number}" for number in range(23, 11, -1)]
    assert kept["large"] == ["e50", *kept["many"][:11]]
    assert kept["larger"] == ["e60"], "two of 300 MB together are more than is kept"


async def test_from_text_there_is_nothing_to_mask(opened: Open) -> None:
    async with opened(FakeGateway(models=[PAINTER])) as (page, _):
        await masked(page)
        share = await masked_share(page)
        await page.get_by_role("button", name="From text").click()
        for tool in (
            "[data-tool=brush]",
            "[data-tool=lasso]",
            "#brush-size",
            "#invert",
            "#load-mask",
            "#undo",
        ):
            await expect(page.locator(tool)).to_be_hidden()
        await expect(page.locator("#zoom-in")).to_be_visible()
        await expect(page.locator("#stage-note")).to_be_empty()
        assert await color_at(page, 0, 0) == GREY, "no mask is seen"
        await drag(page, (-60, 60), (60, 60))
        await page.keyboard.press("i")
        await page.get_by_role("button", name="From a picture").click()
        assert await masked_share(page) == share
        await page.reload()
        await ready(page)
        await page.get_by_role("button", name="From text").click()
        await expect(page.get_by_role("heading", name="The picture appears here")).to_be_visible()
        await expect(page.get_by_role("heading", name="Drop a picture here")).to_be_hidden()


async def test_a_lasso_masks_what_it_surrounds(opened: Open) -> None:
    async with opened(FakeGateway()) as (page, _):
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


async def test_a_click_takes_or_leaves_one_of_what_was_found(opened: Open) -> None:
    one, other = np.zeros((SIDE, SIDE), np.uint8), np.zeros((SIDE, SIDE), np.uint8)
    one[64:192, 32:96] = other[64:192, 160:224] = 255
    gateway = FakeGateway(
        masks={"tiny": MaskCard(name="seer", threshold=0.5)}, found=(file(one), file(other))
    )
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
        await expect(page.locator("#stage-note")).to_have_text("Nothing is masked yet.")
        await page.mouse.click(right, y)
        await edit(page, prompt="a red boot")
        await finished(page)
        assert np.array_equal(sent_mask(gateway.forms[0]), other > 0)


async def test_a_mask_file_becomes_the_mask(opened: Open) -> None:
    half = np.zeros((64, 64), np.uint8)
    half[:, 32:] = 255
    async with opened(FakeGateway()) as (page, _):
        await ready(page)
        await load_mask(page, half)
        await expect(page.locator("#picture-error")).to_contain_text("Choose a picture first.")
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
        await expect(page.locator("#stage-note")).to_have_text("Nothing is masked yet.")


async def test_pictures_of_an_edit_are_kept_or_discarded(opened: Open) -> None:
    async with opened(FakeGateway(pictures=4)) as (page, _):
        await masked(page)
        await edit(page)
        await finished(page)
        note, film = page.locator("#result-note"), page.locator("#film button")
        await page.locator("#stage").focus()
        await page.keyboard.press("ArrowDown")
        await expect(note).to_have_text("Seed 41")
        await page.keyboard.press("ArrowUp")
        await page.keyboard.press("ArrowUp")
        await expect(note).to_have_text("Seed 43")
        await page.click("#discard")
        await expect(note).to_have_text("Seed 42")
        await expect(film).to_have_count(3)
        await page.locator("#stage").focus()
        await page.keyboard.press("ArrowUp")
        await expect(note).to_have_text("Seed 41")
        await page.click("#keep")
        await expect(page.locator("#decide")).to_be_hidden()
        await expect(page.locator("#film")).to_be_hidden()
        await expect(page.locator("#download")).to_be_focused()
        await page.reload()
        await finished(page)  # without another look at the gateway
        await expect(note).to_have_text("Seed 41")
        await expect(page.locator("#film")).to_be_hidden()


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
    [form] = gateway.forms
    mask, image = sent_mask(form), pixels(part(form, "image"))
    assert mask.shape == image.shape[:2] == (SIDE + 32, SIDE + 64)
    assert mask[:, :64].all()
    assert mask[SIDE:].all()
    assert 100 * mask[:SIDE, 64:].mean() == pytest.approx(inner, abs=0.1)
    assert (image[..., :3] == BLUE).all(), "the edge goes on where the picture ended"
