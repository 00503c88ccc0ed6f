"""Pictures that a model looks at beside the edited one, on the studio page; a gateway inside the browser."""

from __future__ import annotations

import base64
import json

import pytest
from playwright.async_api import FilePayload, Page, expect

from giornata.families import Family
from tests.e2e.studio.easel import finished, masked, ready
from tests.e2e.studio.gateway import BLUE, FILL, GREEN, PAINTER, RED, FakeGateway, Open, plain

pytestmark = pytest.mark.asyncio(loop_scope="module")

REFERRING = PAINTER.model_copy(
    update={"name": "klein", "family": Family.FLUX2_KLEIN, "references": 1, "max_references": 2}
)
PICTURES = [plain(color, 16) for color in (BLUE, GREEN, RED)]


async def add(page: Page, *numbers: int) -> None:
    files = [
        FilePayload(name=f"{number}.png", mimeType="image/png", buffer=PICTURES[number]) for number in numbers
    ]
    await page.set_input_files("#reference-file", files)


async def test_references_are_added_removed_and_sent(opened: Open) -> None:
    gateway = FakeGateway(models=[REFERRING, FILL])
    async with opened(gateway) as (page, _):
        await masked(page)
        await page.select_option("#model", "tiny")
        await expect(page.locator("#reference")).to_be_hidden()
        await page.select_option("#model", "klein")
        thumbs = page.locator("#reference-strip button")
        await add(page, 0)
        await expect(thumbs).to_have_count(1)
        await add(page, 1, 2)
        await expect(page.locator("#reference-error")).to_have_text("The model takes at most 2 references.")
        await expect(page.locator("#reference-note")).to_have_text("2 of at most 2")
        await expect(page.locator("#reference")).to_be_disabled()
        await page.get_by_role("button", name="Remove the reference 0.png").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("button", name="Remove the reference 1.png")).to_be_focused()
        await expect(page.locator("#reference")).to_be_enabled()
        await page.select_option("#model", "tiny")
        await page.click("#go")
        await finished(page)
        await page.select_option("#model", "klein")
        await page.click("#go")
        await expect(page.locator("#visit-strip button")).to_have_count(2)
    plainly, form = gateway.forms
    assert b'name="reference"' not in plainly
    assert form.count(b'; name="reference"') == 1
    assert PICTURES[1] in form


async def test_a_generation_has_references_too(opened: Open) -> None:
    gateway = FakeGateway(models=[REFERRING])
    async with opened(gateway) as (page, _):
        await ready(page)
        await page.get_by_role("button", name="From text").click()
        await add(page, 0, 1)
        await expect(page.locator("#reference-strip button")).to_have_count(2)
        await page.fill("#prompt", "a red barn")
        await page.click("#go")
        await finished(page)
    [body] = gateway.forms
    sent = [base64.b64decode(text.split(",")[1]) for text in json.loads(body)["reference"]]
    assert sent == PICTURES[:2]


async def test_what_is_no_picture_is_refused_beside_the_control(opened: Open) -> None:
    async with opened(FakeGateway(models=[REFERRING])) as (page, _):
        await ready(page)
        await page.set_input_files(
            "#reference-file", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"x"}
        )
        await expect(page.locator("#reference-error")).to_contain_text("“a.txt” is text/plain")
        await expect(page.locator("#reference-strip button")).to_have_count(0)
