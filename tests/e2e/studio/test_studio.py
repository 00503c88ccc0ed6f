"""The studio page in a real browser, against the whole system: draw, edit, watch, cancel, compare, download.

Pictures of what it looks like land in ``out/screens/``.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from playwright.async_api import expect

from tests.e2e.pictures import file, scene
from tests.e2e.studio.browsing import screenshot
from tests.e2e.studio.easel import (
    CANCELLED,
    LONG,
    Visit,
    color_at,
    downloaded,
    drag,
    edit,
    finished,
    masked_share,
    open_picture,
    open_sample,
    running,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.usefixtures("slow_steps")
async def test_a_mask_drawn_by_mouse_is_repainted_and_the_rest_is_kept(visit: Visit, tmp_path: Path) -> None:
    original = scene(256, 192)
    async with visit() as (page, _):
        await open_picture(page, file(original))
        await drag(page, (-120, 0), (120, 0))
        await expect(page.locator("#stage-note")).to_have_text(
            re.compile(r"^\d+(\.\d)? % of the picture is masked")
        )
        inside, outside = (0, 0), (0, 150)
        before = [await color_at(page, *place) for place in (inside, outside)]
        await edit(page, prompt="a red star", steps=24, blur=0, seed=7)
        await running(page, "24")
        await page.wait_for_selector("#stage[data-previews]")
        preview = [await color_at(page, *place) for place in (inside, outside)]
        assert preview[0] != before[0]  # no longer the mask's own colour
        assert preview[1] == before[1]
        await screenshot(page, "editing")
        await finished(page)
        await expect(page.locator("#result-note")).to_have_text("Seed 7")
        await screenshot(page, "result")
        result = await downloaded(page, tmp_path)
    changed = np.any(result != original, axis=-1)
    rows, columns = np.nonzero(changed)
    assert result.shape == original.shape
    assert changed.mean() > 0.05
    # a stroke along the middle, as thick as the brush, and nothing beyond it
    assert 24 <= np.ptp(rows) <= 48
    assert abs(rows.mean() - 96) < 3
    assert abs(columns.mean() - 128) < 3


async def test_a_result_is_compared_and_becomes_the_next_input(visit: Visit, tmp_path: Path) -> None:
    async with visit() as (page, _):
        await open_sample(page)
        async with page.expect_response("**/v1/jobs") as accepted:
            await edit(page, steps=2)
        assert (await (await accepted.value).json())["priority"] == "interactive"
        await finished(page)
        slider = page.locator("#compare")
        await slider.focus()
        half = await page.locator("#stage").screenshot()
        await page.keyboard.press("Home")
        await expect(slider).to_have_attribute("aria-valuetext", "0 % original")
        after = await page.locator("#stage").screenshot()
        await page.keyboard.press("End")
        before = await page.locator("#stage").screenshot()
        assert len({half, after, before}) == 3
        await drag(page, (0, 0), (-100, 0))
        await expect(slider).not_to_have_attribute("aria-valuetext", "100 % original")
        await page.click("#use-result")
        await expect(page.locator("#stage-note")).to_have_text("Nothing is masked yet.")
        await expect(page.locator("#result")).to_be_hidden()
        await page.get_by_role("button", name=re.compile("^Edit: ")).click()
        await finished(page)


async def test_several_pictures_of_one_edit(visit: Visit) -> None:
    async with visit() as (page, _):
        await open_sample(page, "Cat")
        await edit(page, steps=6, n=3, seed=40)
        await finished(page)
        film = page.locator("#film button")
        await expect(film).to_have_count(3)
        await film.nth(2).click()
        await expect(page.locator("#result-note")).to_have_text("Seed 42")
        await expect(film.nth(2)).to_have_attribute("aria-pressed", "true")
        await screenshot(page, "several")


async def test_crop_to_the_mask(visit: Visit, tmp_path: Path) -> None:
    original = scene(320, 240)
    async with visit() as (page, _):
        await open_picture(page, file(original))
        await page.click("[data-tool=rectangle]")
        await drag(page, (-40, -40), (40, 40))
        await page.check("#crop")
        await edit(page, prompt="a red star", steps=4, blur=0, padding=8)
        await finished(page)
        result = await downloaded(page, tmp_path)
    changed = np.any(result != original, axis=-1)
    rows, columns = np.nonzero(changed)
    assert changed.any()
    assert max(np.ptp(rows), np.ptp(columns)) <= 80 / 2 + 2  # the picture is seen at more than twice its size


@pytest.mark.usefixtures("slow_steps")
async def test_cancel_ends_the_edit_and_says_so(visit: Visit) -> None:
    async with visit() as (page, _):
        await open_sample(page)
        await edit(page, steps=LONG)
        await running(page)
        await page.click("#cancel")
        await expect(page.locator("#run")).to_be_hidden()
        await expect(page.locator("#stage-note")).to_have_text(CANCELLED)
        await expect(page.locator("#go")).to_be_enabled()
        await expect(page.locator("#edit-error")).to_be_hidden()


@pytest.mark.usefixtures("slow_steps")
async def test_an_edit_survives_a_reload(visit: Visit) -> None:
    async with visit() as (page, _):
        await open_sample(page, "Coffee")
        await edit(page, steps=LONG)
        await running(page)
        await page.reload()
        await running(page)
        await expect(page.locator("#picture-note")).to_contain_text("480")
        await page.click("#cancel")
        await expect(page.locator("#stage-note")).to_have_text(CANCELLED)
        await page.click("#invert")
        assert 80 < await masked_share(page) < 99  # the mask is the sample's still, and not the whole picture
