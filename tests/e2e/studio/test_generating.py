"""Pictures from text on the studio page, against a gateway inside the browser."""

from __future__ import annotations

import asyncio
import json

import pytest
from playwright.async_api import Browser, Page, expect

from giornata.wire.samplers import DISCRETE_TIME
from tests.e2e.studio.browsing import visiting
from tests.e2e.studio.easel import color_at, finished, masked, ready
from tests.e2e.studio.gateway import BLUE, FILL, ORIGIN, PAINTER, RED, FakeGateway, Open, preview

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_where_no_model_generates_there_is_no_choice_of_tasks(opened: Open) -> None:
    async with opened(FakeGateway()) as (page, _):
        await ready(page)
        await expect(page.locator("#strength")).to_be_visible()
        await expect(page.get_by_role("button", name="From text")).to_be_hidden()
        await expect(page.locator("#size")).to_be_hidden()


async def test_a_picture_is_made_from_text_and_can_be_edited(opened: Open) -> None:
    gateway = FakeGateway(models=[PAINTER], pictures=2, events=preview(0, BLUE))
    gateway.ends = asyncio.Event()
    async with opened(gateway) as (page, _):
        await ready(page)
        await page.get_by_role("button", name="From text").click()
        for hidden in ("#choose", "#strength", "#crop", "#padding", "#blur", "#reuse"):
            await expect(page.locator(hidden)).to_be_hidden()
        await expect(page.locator("#guidance")).to_have_value("3.5")
        sizes = await page.eval_on_selector_all(
            "#size option", "options => options.map(({ value }) => value)"
        )
        assert sizes == ["256x256", "304x208", "208x304", "336x192", "192x336"]
        await page.get_by_role("button", name="Generate", exact=True).click()
        await expect(page.locator("#prompt-error")).to_have_text("Write a prompt: what the picture shows.")
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
        "priority": "interactive",
    }


@pytest.mark.parametrize("width", [1280, 360])
async def test_controls_are_those_of_the_chosen_model_and_task(browser: Browser, width: int) -> None:
    true_cfg = PAINTER.model_copy(
        update={
            "name": "qwen",
            "takes_guidance": False,
            "takes_true_cfg": True,
            "default_true_cfg_scale": 4.0,
        }
    )
    unet = PAINTER.model_copy(
        update={
            "name": "sd",
            "guided_above": 1.0,
            "samplers": DISCRETE_TIME,
            "default_sampler": "pndm",
            "reuses": False,
            "generation_steps": 9,
            "token_latents": 8,
            "native_size": 128,
        }
    )
    gateway = FakeGateway(models=[FILL, PAINTER, true_cfg, unet])
    view = {"width": width, "height": 860}
    async with visiting(browser, ORIGIN, serve=gateway.serve, viewport=view) as (page, _):
        await masked(page)
        always = {"model", "prompt", "steps", "seed", "n"}
        of_edits = always | {"strength", "reuse", "padding", "blur"}
        for name, shown in {
            "tiny": of_edits | {"guidance"},
            "qwen": of_edits | {"negative", "true-cfg"},
            "sd": of_edits | {"guidance", "negative", "sampler"},
        }.items():
            await page.select_option("#model", name)
            assert await controls(page) == shown
            assert await page.evaluate("document.documentElement.scrollWidth") == width
        await expect(page.locator("#reuse")).to_have_value("off")
        await page.select_option("#sampler", "ddim")
        await page.select_option("#model", "qwen")
        await expect(page.locator("#reuse")).to_have_value("auto")
        await expect(page.locator("#true-cfg")).to_be_disabled()
        await page.fill("#negative", "snow")
        await page.fill("#strength", "0.5")
        await expect(page.locator("#true-cfg")).to_have_value("4")
        await page.fill("#true-cfg", "1")
        await page.click("#go")
        await expect(page.locator("#true-cfg")).to_be_focused()
        await page.select_option("#model", "sd")
        await expect(page.locator("#true-cfg-error")).to_be_hidden()
        await page.click("#go")
        await finished(page)
        await page.get_by_role("button", name="From text").click()
        assert await controls(page) == always | {"guidance", "negative", "sampler", "size"}
        await expect(page.locator("#steps")).to_have_value("9")
        sizes = await page.eval_on_selector_all("#size option", "all => all.map(({ value }) => value)")
        assert sizes == ["128x128", "128x64", "64x128"]
    (form,) = gateway.forms
    for name, value in {
        "negative_prompt": b"snow",
        "sampler": b"ddim",
        "strength": b"0.5",
        "reuse": b"off",
    }.items():
        assert b'name="%s"\r\n\r\n%s\r\n' % (name.encode(), value) in form  # what still applies is kept
    assert b"true_cfg_scale" not in form


async def controls(page: Page) -> set[str]:
    """Ids of the form's fields that are seen."""
    seen = "all => all.filter((one) => one.checkVisibility()).map(({ id }) => id)"
    return set(await page.eval_on_selector_all("#edit [name]", seen))


async def test_an_edit_after_a_change_of_mind_is_sent_as_one(opened: Open) -> None:
    gateway = FakeGateway(models=[PAINTER])
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
