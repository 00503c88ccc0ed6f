"""The studio page against the whole system: what is drawn is repainted, an edit is found again and cancelled.

Pictures of what it looks like land in ``out/screens/``. What a gateway alone can show, the other files hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from playwright.async_api import Browser, expect

from giornata_lab.bench.systems.edit_forms import file, scene
from tests.e2e.live import LiveStack
from tests.e2e.studio.browsing import screenshot, visiting
from tests.e2e.studio.easel import (
    CANCELLED,
    LONG,
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

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("slow_steps")]


async def test_a_mask_drawn_by_mouse_is_repainted_and_the_rest_is_kept(
    browser: Browser, stack: LiveStack, slow_steps: Callable[[], None], tmp_path: Path
) -> None:
    original = scene(256, 192)
    async with visiting(browser, stack.url) as (page, _):
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
        slow_steps()
        await finished(page)
        await expect(page.locator("#result-note")).to_have_text("Seed 7")
        result = await downloaded(page, tmp_path)
    changed = np.any(result != original, axis=-1)
    rows, columns = np.nonzero(changed)
    assert result.shape == original.shape
    assert changed.mean() > 0.05
    # a stroke along the middle, as thick as the brush, and nothing beyond it
    assert 24 <= np.ptp(rows) <= 48
    assert abs(rows.mean() - 96) < 3
    assert abs(columns.mean() - 128) < 3


async def test_an_edit_is_followed_by_the_fleet_panel_survives_a_reload_and_is_cancelled(
    browser: Browser, stack: LiveStack
) -> None:
    async with visiting(browser, stack.url) as (page, _):
        await open_sample(page, "Coffee")
        await expect(page.locator("#fleet-note")).to_have_text("1 worker")
        await expect(page.locator("#fleet-running")).to_have_text("0 pictures")
        await expect(page.locator("#fleet-wait")).to_have_text("none")
        async with page.expect_response("**/v1/jobs") as accepted:
            await edit(page, steps=LONG, n=2)
        assert (await (await accepted.value).json())["priority"] == "interactive"
        await expect(page.locator("#fleet-running")).to_have_text("2 pictures")
        await expect(page.locator("#fleet-free")).to_have_text("6 pictures")
        await expect(page.locator("#fleet-steps")).to_have_text(re.compile(r"^(?!0\.0)\d+\.\d$"))
        await expect(page.locator("#fleet-workers .state")).to_have_text(
            re.compile(r"running, \d+ ms a step")
        )
        await running(page)
        await page.reload()
        await running(page)
        await expect(page.locator("#picture-note")).to_contain_text("480")
        await page.click("#cancel")
        await expect(page.locator("#stage-note")).to_have_text(CANCELLED)
        await expect(page.locator("#run")).to_be_hidden()
        await expect(page.locator("#go")).to_be_enabled()
        await expect(page.locator("#edit-error")).to_be_hidden()
        await expect(page.locator("#fleet-running")).to_have_text("0 pictures")
        await page.click("#invert")
        assert 80 < await masked_share(page) < 99  # the mask is the sample's still, and not the whole picture
