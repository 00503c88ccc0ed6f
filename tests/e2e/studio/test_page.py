"""The studio's surroundings: the fleet, the key, light and dark, accessibility, the API's document."""

from __future__ import annotations

import json
import re

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.async_api import Page, expect

from giornata.wire.errors import TooManyStreams
from giornata.wire.messages import MaskCard
from tests.e2e.studio.easel import edit, finished, open_sample, ready
from tests.e2e.studio.gateway import DOCUMENT, PAINTER, FakeGateway, Open, fleet
from tests.e2e.studio.test_adapters import LORAS, NETS

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEY = "sk-studio-test"
RULES = ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa", "best-practice", "experimental"]
FOUND = """async ({ part, types, rules }) => {
    const runOnly = { type: types, values: rules };
    const { violations } = await axe.run(part, { resultTypes: ["violations"], runOnly });
    return violations.map(({ id, nodes }) => [id, nodes.map(({ html }) => html)]);
}"""


async def faultless(page: Page, state: str, part: str = "html") -> None:
    """No rule is broken in `part` of the page in the light, and no contrast is too weak in the dark."""
    for scheme, types, rules in (("light", "tag", RULES), ("dark", "rule", ["color-contrast"])):
        await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]  # one of its literals
        found = await page.evaluate(FOUND, {"part": part, "types": types, "rules": rules})
        assert found == [], f"{state}, {scheme}: {json.dumps(found)}"


async def test_no_rule_of_accessibility_is_broken(opened: Open) -> None:
    model = PAINTER.model_copy(
        update={"name": "tiny", "step_caches": ("taylorseer",), "references": 1, "max_references": 2}
    )
    gateway = FakeGateway(
        models=[model],
        pictures=2,
        loras=LORAS,
        controlnets={"tiny": NETS},
        masks={"tiny": MaskCard(name="seer", threshold=0.5)},
    )
    async with opened(gateway, reduced_motion="reduce") as (page, _):
        await ready(page)
        await page.evaluate(AXE_SCRIPT)
        await expect(page.locator("#fleet-note")).to_have_text("1 worker")
        await faultless(page, "empty")
        await open_sample(page)
        await page.fill("#prompt", "")
        for section in ("#lora-section", "#controlnet-section", "#speed", "#extend-section"):
            await page.click(f"{section} summary")
        await page.select_option("#lora-choice", label="rims")
        await page.select_option("#controlnet-choice", "union")
        await page.select_option("#step-cache", "taylorseer")
        await edit(page, interval=1)
        await expect(page.locator("#interval")).to_have_attribute("aria-invalid", "true")
        await faultless(page, "mistakes", "main")
        await page.get_by_role("button", name="Remove the ControlNet union").click()
        await edit(page, interval=2, prompt="a red star")
        await finished(page)
        await faultless(page, "result", "main")
        for opener, dialog in (("#open-help", "#help"), ("#open-key", "#key")):
            await page.click(opener)
            await expect(page.locator(dialog)).to_be_visible()
            await faultless(page, dialog[1:], dialog)
            await page.keyboard.press("Escape")
        await page.get_by_role("button", name="From text").click()
        await faultless(page, "from-text", "main")


async def test_the_key_is_asked_for_and_kept_in_the_tab_and_the_fleets_numbers_or_why_there_are_none(
    opened: Open,
) -> None:
    gateway = FakeGateway(key=KEY, fleet=fleet("tiny", running=2, waiting=1, queued=3, wait_s=7.25))
    async with opened(gateway) as (page, watch):
        watch.expected += ["status of 401", "status of 429"]
        await expect(page.locator("#key")).to_be_visible()
        await expect(page.locator("#key-error code")).to_have_text("unauthorized")
        await page.fill("#key-input", KEY)
        await page.keyboard.press("Enter")
        await expect(page.locator("#key")).to_be_hidden()
        await expect(page.locator("#model-note")).to_have_text("tiny")
        await open_sample(page, "Cat")
        await page.click("#go")
        await finished(page)
        kept = "[JSON.stringify(sessionStorage).includes(key), JSON.stringify(localStorage).includes(key)]"
        assert await page.evaluate(f"(key) => {kept}", KEY) == [True, False]
        await expect(page.locator("#pulse-text")).to_have_text("1 worker, 2 running, 7 waiting")
        for name, text in {
            "running": "2 pictures",
            "free": "5 pictures",
            "queued": "3",
            "steps": "2.5",
        }.items():
            await expect(page.locator(f"#fleet-{name}")).to_have_text(text)
        await expect(page.locator("#fleet-wait")).to_have_text(re.compile(r"^about 7\.[23] s$"))
        gateway.become(fleet=fleet("tiny", waiting=1))
        await expect(page.locator("#pulse-text")).to_have_text("1 worker, 1 waiting")
        refusal = TooManyStreams("Too many follow the fleet.")
        gateway.become(refusals={"/v1/fleet": refusal})
        await expect(page.locator("#pulse-text")).to_have_text("Too many follow the fleet. too_many_streams")
        await expect(page.locator("#fleet-queued")).to_have_text("unknown")


async def test_light_dark_and_the_switch_between_them(opened: Open) -> None:
    async def bright(page: Page) -> bool:
        """Whether the page's ground is light."""
        color = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        red, green, blue = map(int, re.findall(r"\d+", color)[:3])
        assert not 60 < (red + green + blue) / 3 < 200, color
        return red + green + blue > 600

    async with opened() as (page, _):
        await ready(page)
        assert await bright(page)
        await page.emulate_media(color_scheme="dark")
        assert not await bright(page)
        for name, light in (("light", True), ("dark", False)):
            await page.click("#theme")
            await expect(page.get_by_role("button", name=f"Theme: {name}")).to_be_visible()
            assert await bright(page) == light
        await page.emulate_media(color_scheme="light")
        await page.reload()
        assert not await bright(page)


async def test_docs_show_every_path_offline(opened: Open) -> None:
    async with opened(path="/docs") as (page, _):
        shown = page.locator(".docs-path")
        await expect(shown.first).to_be_visible()
        assert set(await shown.all_text_contents()) == DOCUMENT["paths"].keys()
        await page.locator("#edit summary").click()
        await page.locator("#edit").get_by_role("link", name="EditForm", exact=True).first.click()
        await expect(page.get_by_text("padding_mask_crop").first).to_be_visible()
