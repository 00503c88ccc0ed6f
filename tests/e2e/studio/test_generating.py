"""Pictures from text on the studio page, against a gateway inside the browser."""

from __future__ import annotations

import asyncio
import json

import pytest
from playwright.async_api import expect

from giornata.wire.models import Task
from tests.e2e.studio.easel import color_at, finished, masked, ready
from tests.e2e.studio.gateway import BLUE, RED, FakeGateway, Open, preview

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_where_no_model_generates_the_tab_is_disabled_and_says_why(opened: Open) -> None:
    async with opened(FakeGateway()) as (page, _):
        await ready(page)
        await expect(page.get_by_role("button", name="From text")).to_be_disabled()
        await expect(page.locator("#task-why")).to_contain_text("tiny edits pictures only")
        await expect(page.locator("#size")).to_be_hidden()


async def test_a_picture_is_made_from_text_and_can_be_edited(opened: Open) -> None:
    gateway = FakeGateway(tasks=(Task.EDIT, Task.GENERATE), pictures=2, events=preview(0, BLUE))
    gateway.ends = asyncio.Event()
    async with opened(gateway) as (page, _):
        await ready(page)
        await page.get_by_role("button", name="From text").click()
        for hidden in ("#choose", "#strength", "#crop", "#padding", "#blur"):
            await expect(page.locator(hidden)).to_be_hidden()
        await expect(page.locator("#guidance")).to_have_value("3.5")
        sizes = await page.eval_on_selector_all(
            "#size option", "options => options.map(({ value }) => value)"
        )
        assert sizes == ["256x256", "304x208", "208x304", "336x192", "192x336"]
        await page.get_by_role("button", name="Generate", exact=True).click()
        await expect(page.locator("#prompt-error")).to_have_text("Say what the picture shows.")
        await page.fill("#prompt", "a red barn")
        await page.fill("#n", "2")
        await page.fill("#seed", "11")
        await page.get_by_role("button", name="Generate", exact=True).click()
        await expect(page.locator("#stage")).to_have_attribute("data-previews", "1")
        assert await color_at(page, 0, 0) == pytest.approx(BLUE, abs=2)  # no mask hides a part of it
        gateway.ends.set()
        await finished(page)
        assert await color_at(page, 0, 0) == pytest.approx(RED, abs=2)
        await expect(page.locator("#compare-label")).to_be_hidden()
        await expect(page.locator("#film button")).to_have_count(2)
        await page.get_by_role("button", name="Use as new input").click()
        await expect(page.locator("#picture-note")).to_contain_text("256")
        await expect(page.get_by_role("button", name="From a picture")).to_have_attribute(
            "aria-pressed", "true"
        )
    [body] = gateway.forms
    assert json.loads(body) == {
        "prompt": "a red barn",
        "num_inference_steps": 4,
        "guidance_scale": 3.5,
        "n": 2,
        "seed": 11,
        "size": "256x256",
        "partial_images": 8,
    }


async def test_an_edit_after_a_change_of_mind_is_sent_as_one(opened: Open) -> None:
    gateway = FakeGateway(tasks=(Task.EDIT, Task.GENERATE))
    async with opened(gateway) as (page, _):
        await ready(page)
        await page.get_by_role("button", name="From text").click()
        await masked(page)  # a picture is opened
        await expect(page.locator("#strength")).to_be_visible()
        await page.locator("#go").click()
        await finished(page)
        await expect(page.locator("#compare-label")).to_be_visible()
    [body] = gateway.forms
    assert b'name="mask"' in body
    assert b'name="size"' not in body
