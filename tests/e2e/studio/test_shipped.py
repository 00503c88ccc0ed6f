"""What ships with the trained model, on the studio page against the whole system: adapters, and masks from words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.async_api import Browser, FilePayload, Page, expect

from giornata.wire.workers import ServiceName
from giornata_lab.bench.systems.edit_forms import Pixels
from giornata_lab.demo.exhibits import AdapterExhibit, adapter_exhibits, by_words
from giornata_tools.checkout import TRAINED
from giornata_tools.launcher.models import StackModel, shipped_masks, with_controlnets
from giornata_tools.lora_profiler.probes import png
from tests.e2e.live import LiveStack, live_stack
from tests.e2e.studio.browsing import screenshot, visiting
from tests.e2e.studio.easel import downloaded, edit, finished, masked_share, open_picture, open_sample

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]


@pytest.fixture(scope="module")
def shipped() -> Iterator[LiveStack]:
    """The trained model with its ControlNet and its segmenter."""
    (served,) = with_controlnets((StackModel(str(TRAINED)),), {})
    env_of = {ServiceName.DENOISER: served.env, ServiceName.PREPOST: shipped_masks((served,), {})}
    with live_stack(TRAINED, env_of=env_of) as live:
        yield live


def shown(name: str) -> AdapterExhibit:
    return next(each for each in adapter_exhibits() if each.adapter.name == name)


async def edited(page: Page, exhibit: AdapterExhibit, folder: Path) -> Pixels:
    await edit(page, prompt=exhibit.exhibit.parameters.prompt, steps=8, seed=7)
    await finished(page)
    return (await downloaded(page, folder)).astype(int)


async def test_an_uploaded_lora_changes_the_picture(
    browser: Browser, shipped: LiveStack, tmp_path: Path
) -> None:
    exhibit = shown("swapped")
    async with visiting(browser, shipped.url) as (page, watch):
        await open_picture(page, png(exhibit.exhibit.picture))
        await page.click("#invert")
        without = await edited(page, exhibit, tmp_path)
        await expect(page.locator("#result-adapters")).to_be_hidden()
        await page.click("#lora-section summary")
        await page.set_input_files("#lora-file", exhibit.adapter.file)
        await expect(page.locator("#lora-state")).to_have_text("swapped.safetensors is ready")
        await page.click("#go")
        await finished(page, 2)
        await expect(page.locator("#result-adapters")).to_contain_text("LoRA swapped")
        await expect(page.locator("#result-adapters")).to_contain_text("from the first step")
        under = (await downloaded(page, tmp_path)).astype(int)
        watch.expected.append("status of 400")
        await page.set_input_files(
            "#lora-file", {"name": "no.safetensors", "mimeType": "application/octet-stream", "buffer": b"no"}
        )
        await expect(page.locator("#lora-error code")).to_have_text("lora_unreadable")
    assert np.abs(without - under).max() > 50


async def test_a_controlnet_follows_its_control_image(
    browser: Browser, shipped: LiveStack, tmp_path: Path
) -> None:
    exhibit = shown("outline")
    assert exhibit.control is not None
    async with visiting(browser, shipped.url) as (page, watch):
        await open_picture(page, png(exhibit.exhibit.picture))
        await page.click("#invert")
        without = await edited(page, exhibit, tmp_path)
        await page.click("#controlnet-section summary")
        await page.select_option("#controlnet-choice", "outline")
        control = FilePayload(name="control.png", mimeType="image/png", buffer=png(exhibit.control))
        await page.locator("#controlnet-cards input[type=file]").set_input_files(control)
        await page.get_by_role("spinbutton", name="Scale of outline").fill("0.9")
        await page.click("#go")
        await finished(page, 2)
        await expect(page.locator("#result-adapters")).to_contain_text("ControlNet outline")
        await screenshot(page, "adapters")
        under = (await downloaded(page, tmp_path)).astype(int)
        watch.expected.append("status of 400")
        await page.evaluate("document.querySelector('#controlnet-cards input[type=number]').max = 9")
        await page.get_by_role("spinbutton", name="Scale of outline").fill("8")
        await page.click("#go")
        await expect(page.get_by_role("group", name="ControlNet outline")).to_contain_text("invalid_field")
    assert np.abs(without - under).max() > 50


async def test_words_find_one_of_several_things_and_it_alone_is_edited(
    browser: Browser, shipped: LiveStack, tmp_path: Path
) -> None:
    scene = by_words()
    before, meant = np.asarray(scene.picture).astype(int), np.asarray(scene.mask) > 0
    async with visiting(browser, shipped.url) as (page, _):
        await open_sample(page, "One of several")
        await page.click("#clear")
        await expect(page.locator("#stage-note")).to_have_text("Nothing is masked yet.")
        await page.fill("#words", scene.parameters.mask_prompt or "")
        await page.press("#words", "Enter")
        await expect(page.locator("#stage-note")).to_contain_text("masked.")
        share = await masked_share(page)
        await screenshot(page, "words")
        await edit(page, prompt=scene.parameters.prompt, steps=8, seed=7)
        await finished(page)
        changed = np.abs((await downloaded(page, tmp_path)).astype(int) - before).max(axis=2) > 0
    assert share == pytest.approx(100 * meant.mean(), rel=0.2)
    assert changed[meant].mean() > 0.8
    assert changed[:, 128:].mean() < 0.01, "the blue circle is no red one"
    assert changed[128:].mean() < 0.01
