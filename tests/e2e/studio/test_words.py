"""A mask from words on the studio page, against a gateway inside the browser; test_shipped.py has the whole system."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import expect

from giornata.wire.masks import MaskCard
from giornata_gateway.views.answers import ErrorDetail
from tests.e2e.pictures import box, file
from tests.e2e.studio.easel import drag, edit, finished, masked_share, open_picture, ready
from tests.e2e.studio.gateway import GREY, PAINTER, SIDE, FakeGateway, Open, plain

pytestmark = pytest.mark.asyncio(loop_scope="module")
CARD = MaskCard(name="seer", threshold=0.5)


def seeing() -> FakeGateway:
    """A gateway that finds the middle quarter of every picture, whatever the words."""
    return FakeGateway(masks={"tiny": CARD}, found=(file(box(SIDE, SIDE)),))


async def test_what_words_name_becomes_the_mask_and_is_edited_like_one_that_was_drawn(opened: Open) -> None:
    gateway = seeing()
    async with opened(gateway) as (page, _):
        await open_picture(page, plain(GREY))
        await drag(page, (-30, 0), (30, 0))
        drawn = await masked_share(page)
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
    (asked,) = gateway.named
    assert b'name="prompt"\r\n\r\nthe red circle\r\n' in asked
    assert plain(GREY) in asked
    (form,) = gateway.forms
    assert b"mask_prompt" not in form, "what was found is sent as what was drawn is"
    assert file(box(SIDE, SIDE))[:8] in form


async def test_words_that_name_nothing_are_told_beside_them_and_leave_the_mask(opened: Open) -> None:
    gateway = seeing()
    gateway.found = ErrorDetail(
        message="prompt: The words name nothing.",
        type="invalid_request_error",
        param="prompt",
        code="nothing_found",
    )
    async with opened(gateway) as (page, watch):
        watch.expected.append("status of 422")
        await open_picture(page, plain(GREY))
        await drag(page, (-30, 0), (30, 0))
        drawn = await masked_share(page)
        await page.fill("#words", "a dog")
        await page.click("#find")
        await expect(page.locator("#words-error code")).to_have_text("nothing_found")
        await expect(page.locator("#prompt-error")).to_be_hidden()
        assert await masked_share(page) == drawn
        await edit(page, prompt="a star")  # what was drawn can be edited all the same
        await finished(page)


async def test_a_picture_and_words_are_needed(opened: Open) -> None:
    gateway = seeing()
    async with opened(gateway) as (page, _):
        await ready(page)
        await page.click("#find")
        await expect(page.locator("#words-error")).to_have_text("Choose a picture first.")
        await open_picture(page, plain(GREY))
        await page.click("#find")
        await expect(page.locator("#words-error")).to_have_text("Say what to edit.")
        await page.fill("#words", "x")
        await expect(page.locator("#words-error")).to_be_hidden()
    assert gateway.named == []


async def test_a_mask_that_comes_after_another_picture_was_opened_is_dropped(opened: Open) -> None:
    gateway = seeing()
    gateway.accepts.clear()
    async with opened(gateway) as (page, _):
        await open_picture(page, plain(GREY))
        await page.fill("#words", "the circle")
        await page.click("#find")
        await expect(page.locator("#find")).to_be_disabled()
        await open_picture(page, plain(GREY), "other.png")
        gateway.accepts.set()
        await expect(page.locator("#find")).to_be_enabled()
        await expect(page.locator("#stage-note")).to_have_text("Nothing is masked yet.")


async def test_the_field_is_there_where_masks_are_made_and_pictures_are_edited(opened: Open) -> None:
    async with opened(FakeGateway()) as (page, _):
        await ready(page)
        await expect(page.locator("#words")).to_be_hidden()
    gateway = FakeGateway(models=[PAINTER], masks={PAINTER.name: CARD})
    async with opened(gateway) as (page, _):
        await ready(page)
        await expect(page.locator("#words")).to_be_visible()
        await page.get_by_role("button", name=re.compile("From text")).click()
        await expect(page.locator("#words")).to_be_hidden()
