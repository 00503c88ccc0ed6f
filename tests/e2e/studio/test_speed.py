"""Step caches on the studio page, against a gateway inside the browser."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import Page, Route, expect

from giornata_gateway.views.answers import ErrorAnswer, ErrorDetail
from tests.e2e.studio.easel import finished, masked, ready
from tests.e2e.studio.gateway import FILL, FakeGateway, Open

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIELDS = rb'name="(step_cache\w*)"\r\n\r\n([^\r]*)'
CACHING = FILL.model_copy(update={"step_caches": ("taylorseer",)})
PLAIN = FILL.model_copy(update={"name": "plain"})


def sent(form: bytes) -> dict[str, str]:
    """Fields of a form that this page is about, by name."""
    return {name.decode(): text.decode() for name, text in re.findall(FIELDS, form)}


async def again(page: Page, edits: int) -> None:
    """Edit, until so many edits have been made."""
    await page.click("#go")
    await expect(page.locator("#visit-strip button")).to_have_count(edits)


async def test_controls_are_those_that_the_model_takes_and_nothing_is_sent_before_one_is_chosen(
    opened: Open,
) -> None:
    gateway = FakeGateway(models=[CACHING, PLAIN])
    async with opened(gateway) as (page, _):
        await masked(page)
        await page.select_option("#model", CACHING.name)
        await expect(page.locator("#speed")).not_to_have_attribute("open", "")
        await again(page, 1)
        await page.focus("#speed summary")
        await page.keyboard.press("Enter")
        await page.keyboard.press("Tab")
        await expect(page.get_by_label("Step cache")).to_be_focused()
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("Tab")
        await expect(page.get_by_label("Interval")).to_be_focused()
        await again(page, 2)
        await page.fill("#interval", "1")
        await page.click("#go")
        await expect(page.locator("#interval-error")).to_have_text("From 2 to 20.")
        await page.fill("#interval", "4")
        await page.fill("#warmup", "2")
        await again(page, 3)
        await expect(page.locator("#step-cache option")).to_have_count(2)
        await page.select_option("#step-cache", "off")
        await expect(page.locator("#interval")).to_be_hidden()
        await page.select_option("#model", "plain")
        await expect(page.locator("#speed")).to_be_hidden()
        await again(page, 4)
    assert [sent(form) for form in gateway.forms] == [
        {},
        {"step_cache": "taylorseer"},
        {"step_cache": "taylorseer", "step_cache_interval": "4", "step_cache_warmup": "2"},
        {},
    ]


async def test_a_refusal_of_the_gateway_opens_the_section_and_stands_at_its_control(opened: Open) -> None:
    error = ErrorDetail(
        message="What ControlNets add belongs to one step.",
        type="invalid_request_error",
        param="step_cache",
        code="invalid_field",
    )

    async def refuse(route: Route) -> None:
        answer = ErrorAnswer(error=error).model_dump_json()
        await route.fulfill(status=400, body=answer, content_type="application/json")

    async with opened(FakeGateway(models=[CACHING])) as (page, watch):
        watch.expected.append("status of 400")
        await masked(page)
        await page.click("#speed summary")
        await page.select_option("#step-cache", "taylorseer")
        await page.click("#speed summary")
        await expect(page.locator("#step-cache")).to_be_hidden()
        await page.route("**/v1/jobs", refuse)
        await page.click("#go")
        await expect(page.locator("#step-cache-error code")).to_have_text("invalid_field")
        await expect(page.locator("#step-cache")).to_be_focused()
        await page.unroute("**/v1/jobs", refuse)
        await page.click("#go")
        await finished(page)
        await expect(page.locator("#step-cache-error")).to_be_hidden()


async def test_a_generation_takes_one_too(opened: Open) -> None:
    painter = CACHING.model_copy(update={"tasks": ("edit", "generate"), "generation_guidance_scale": 3.5})
    gateway = FakeGateway(models=[painter])
    async with opened(gateway) as (page, _):
        await ready(page)
        await page.get_by_role("button", name="From text").click()
        await page.fill("#prompt", "a red barn")
        await page.click("#speed summary")
        await page.select_option("#step-cache", "taylorseer")
        await expect(page.locator("#speed-note")).to_have_text("1")
        await page.click("#go")
        await finished(page)
    (body,) = gateway.forms
    assert b'"step_cache":"taylorseer"' in body
