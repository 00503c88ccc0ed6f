"""The studio's surroundings: errors in words, the fleet, the key, light and dark, accessibility, the API's document."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from axe_playwright_python.async_playwright import Axe
from PIL import Image
from playwright.async_api import Browser, Page, Route, expect

from tests.e2e.conftest import StartStack
from tests.e2e.live import LiveStack
from tests.e2e.pictures import file, scene
from tests.e2e.proxy import Proxy
from tests.e2e.studio.browsing import screenshot, visiting
from tests.e2e.studio.easel import (
    CANCELLED,
    LONG,
    Visit,
    drag,
    edit,
    finished,
    open_picture,
    open_sample,
    ready,
    running,
)
from tests.fakes.key_files import write_keys

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "sk-studio-test"
RULES = {
    "runOnly": {
        "type": "tag",
        "values": ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa", "best-practice", "experimental"],
    }
}


async def test_what_is_missing_is_said_before_anything_is_sent(visit: Visit) -> None:
    async with visit() as (page, _):
        await ready(page)
        await page.click("#go")
        await expect(page.locator("#edit-error")).to_have_text("Choose a picture first.")
        await open_picture(page, file(scene()))
        await page.click("#go")
        await expect(page.locator("#edit-error")).to_have_text("Paint over what is to change first.")
        await drag(page, (-30, 0), (30, 0))
        await edit(page, steps=0)
        await expect(page.locator("#prompt-error")).to_have_text(
            "Write a prompt: what belongs into the mask."
        )
        await expect(page.locator("#steps-error")).to_have_text("From 1 to 200.")
        await expect(page.locator("#prompt")).to_be_focused()
        await expect(page.locator("#run")).to_be_hidden()


async def test_a_file_that_is_no_picture_is_refused(visit: Visit) -> None:
    async with visit() as (page, _):
        await ready(page)
        await page.set_input_files(
            "#file", {"name": "a.png", "mimeType": "image/png", "buffer": b"no picture"}
        )
        await expect(page.locator("#picture-error")).to_contain_text("cannot be read as a picture")
        await expect(page.locator("#picture-error code")).to_have_text("picture_unreadable")


async def test_the_gateways_error_stands_at_the_field_it_names(visit: Visit) -> None:
    async with visit() as (page, watch):
        watch.expected.append("status of 400")
        await open_sample(page)
        await page.evaluate("document.getElementById('steps').removeAttribute('max')")
        await edit(page, steps=100_000)
        await expect(page.locator("#steps-error")).to_contain_text("200")
        await expect(page.locator("#steps-error code")).to_have_text("invalid_field")
        await expect(page.locator("#steps")).to_have_attribute("aria-invalid", "true")
        await screenshot(page, "error")
        await edit(page, steps=2)
        await finished(page)


async def test_what_the_model_does_not_take_is_not_asked_for(visit: Visit) -> None:
    async def without_guidance(route: Route) -> None:
        answer = await route.fetch()
        models = await answer.json()
        models["data"][0]["fields"]["edit"].remove("guidance_scale")
        models["data"][0] |= {"samplers": ["heun", "euler"], "native_size": 128}
        await route.fulfill(response=answer, json=models)

    async with visit() as (page, _):
        await page.route("**/v1/models", without_guidance)
        await page.reload()
        await open_sample(page)
        await expect(page.locator("#guidance")).to_be_hidden()
        await expect(page.locator("#crop-why")).to_contain_text("128 × 128")  # noqa: RUF001 - as the page writes it
        await expect(page.locator("#sampler")).to_have_value("euler")
        async with page.expect_request("**/v1/jobs") as sent:
            await edit(page, steps=2)
        await finished(page)
        body = (await sent.value).post_data_buffer or b""
        assert b'name="num_inference_steps"' in body
        assert b'name="sampler"\r\n\r\neuler' in body
        assert b'name="guidance_scale"' not in body


async def test_a_gateway_that_is_gone_is_an_error_in_words(visit: Visit) -> None:
    async with visit() as (page, watch):
        watch.expected.append("ERR_INTERNET_DISCONNECTED")
        await open_sample(page)
        await page.context.set_offline(True)
        await page.click("#go")
        await expect(page.locator("#edit-error code")).to_have_text("gateway_unreachable")
        await expect(page.locator("#stage-note")).to_contain_text("masked")  # nothing is lost
        await page.context.set_offline(False)
        await edit(page, steps=2)
        await finished(page)


@pytest.mark.usefixtures("slow_steps")
async def test_an_edit_outlives_a_lost_connection(browser: Browser, stack: LiveStack) -> None:
    async with Proxy(stack.url).listening() as proxy, visiting(browser, proxy.url) as (page, watch):
        watch.expected.append("net::ERR_")
        await open_sample(page)
        await edit(page, steps=LONG, n=4)
        await running(page)
        proxy.cut()
        await expect(page.locator("#run-link")).to_contain_text("The gateway does not answer.")
        await expect(page.locator("#fleet-error code")).to_have_text("gateway_unreachable")
        await expect(page.locator("#fleet-wait")).to_have_text("unknown")
        async with page.expect_request(re.compile(r"/events$")) as again:
            proxy.mend()
        assert int((await again.value).headers["last-event-id"]) > 0
        await expect(page.locator("#run-link")).to_be_hidden()
        await expect(page.locator("#fleet-error")).to_be_hidden()
        await page.click("#cancel")
        await expect(page.locator("#stage-note")).to_have_text(CANCELLED)


@pytest.mark.usefixtures("slow_steps")
async def test_the_fleet_panel_follows_a_job(visit: Visit) -> None:
    async with visit() as (page, _):
        await open_sample(page)
        await expect(page.locator("#fleet-note")).to_have_text("1 worker")
        await expect(page.locator("#fleet-running")).to_have_text("0 pictures")
        await expect(page.locator("#fleet-wait")).to_have_text("none")
        await edit(page, steps=LONG, n=2)
        await expect(page.locator("#fleet-running")).to_have_text("2 pictures")
        await expect(page.locator("#fleet-free")).to_have_text("6 pictures")
        await expect(page.locator("#fleet-steps")).to_have_text(re.compile(r"^(?!0\.0)\d+\.\d$"))
        await expect(page.locator("#fleet-workers .state")).to_have_text(
            re.compile(r"running, \d+ ms a step")
        )
        await page.locator("#fleet-workers").scroll_into_view_if_needed()
        await screenshot(page, "fleet")
        await page.click("#cancel")
        await expect(page.locator("#stage-note")).to_have_text(CANCELLED)
        await expect(page.locator("#fleet-running")).to_have_text("0 pictures")


async def test_light_dark_and_the_switch_between_them(visit: Visit) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        async with visit(color_scheme=scheme) as (page, _):
            await open_sample(page)
            grounds[scheme] = await ground(page)
            await screenshot(page, scheme)
            await page.click("#theme")
            await expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
            assert await ground(page) > 200
            await page.click("#theme")
            await expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
            assert await ground(page) < 60
            await page.reload()
            assert await ground(page) < 60
    assert grounds["light"] > 200
    assert grounds["dark"] < 60


async def ground(page: Page) -> float:
    """How bright the page's ground is, 0 to 255."""
    shot = await page.screenshot(clip={"x": 4, "y": 400, "width": 4, "height": 4})
    return float(np.asarray(Image.open(io.BytesIO(shot)).convert("L")).mean())


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_no_rule_of_accessibility_is_broken(visit: Visit, scheme: str) -> None:
    async with visit(color_scheme=scheme) as (page, _):
        await ready(page)
        await expect(page.locator("#fleet-note")).to_have_text("1 worker")
        await faultless(page, "empty")
        await open_sample(page)
        await page.fill("#prompt", "")
        await page.click("#speed summary")
        await page.select_option("#step-cache", "taylorseer")
        await page.fill("#interval", "1")
        await page.click("#go")
        await expect(page.locator("#interval")).to_have_attribute("aria-invalid", "true")
        await faultless(page, "mask and mistakes")
        await page.locator("#speed").scroll_into_view_if_needed()
        await screenshot(page, f"speed-{scheme}")
        await page.fill("#interval", "2")
        await edit(page, prompt="a red star", steps=2, n=2)
        await finished(page)
        await faultless(page, "result")
        for opener, dialog in (("#open-help", "#help"), ("#open-key", "#key")):
            await page.click(opener)
            await expect(page.locator(dialog)).to_be_visible()
            await faultless(page, dialog)
            await page.keyboard.press("Escape")


async def faultless(page: Page, state: str) -> None:
    found = (await Axe().run(page, options=RULES)).response["violations"]
    assert found == [], (
        f"{state}: {json.dumps([(one['id'], [node['html'] for node in one['nodes']]) for one in found])}"
    )


async def test_the_key_that_the_gateway_wants_and_the_picture_that_the_service_refuses(
    browser: Browser, start_stack: StartStack, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path, {KEY: "alice"})
    limits = {"GIORNATA_API_KEYS_FILE": str(keys), "GIORNATA_MAX_PIXELS": "160000"}
    stack = start_stack({}, limits)
    async with visiting(browser, stack.url) as (page, watch):
        watch.expected.append("status of 401")
        await expect(page.locator("#key")).to_be_visible()
        await expect(page.locator("#key-error code")).to_have_text("unauthorized")
        await page.fill("#key-input", KEY)
        await page.keyboard.press("Enter")
        await expect(page.locator("#key")).to_be_hidden()
        await expect(page.locator("#model-note")).to_have_text("tiny")
        await open_sample(page, "Cat")
        await edit(page, steps=2)
        await finished(page)
        await open_sample(page, "Astronaut")
        await page.click("#go")
        await expect(page.locator("p.error:visible code")).to_have_text("too_many_pixels")
        await expect(page.locator("#go")).to_be_enabled()
        kept = "[JSON.stringify(sessionStorage).includes(key), JSON.stringify(localStorage).includes(key)]"
        assert await page.evaluate(f"(key) => {kept}", KEY) == [True, False]


async def test_docs_show_every_path_offline(visit: Visit, stack: LiveStack) -> None:
    async with aiohttp.ClientSession(stack.url) as http, http.get("/openapi.json") as answer:
        paths = (await answer.json())["paths"]
    async with visit("/docs") as (page, _):
        for path in paths:
            await expect(page.locator(f'.opblock-summary-path[data-path="{path}"]').first).to_be_visible()
        await page.locator('.opblock-summary-path[data-path="/v1/images/edits"]').click()
        await expect(page.get_by_text("padding_mask_crop").first).to_be_visible()
        await screenshot(page, "docs")
