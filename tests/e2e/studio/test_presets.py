"""What a picture presets on the studio page: a sample its mask, prompt and crop; a person's own large one a crop."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Route, expect

from giornata_lab.demo.exhibits import PHOTOGRAPH_PADDING
from tests.e2e.pictures import file, scene
from tests.e2e.studio.browsing import screenshot
from tests.e2e.studio.easel import Visit, downloaded, edit, finished, open_picture, open_sample

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("title", "prompt"), [("Add a star", "a blue star"), ("Remove a circle", "remove it")]
)
async def test_a_scene_of_the_strip_needs_nothing_but_the_button(
    visit: Visit, tmp_path: Path, title: str, prompt: str
) -> None:
    async with visit() as (page, _):
        await open_sample(page, title)
        await expect(page.locator("#prompt")).to_have_value(prompt)
        await screenshot(page, "strip")
        await edit(page, steps=2)
        await finished(page)
        assert (await downloaded(page, tmp_path)).shape == (256, 256, 3)


async def test_a_picture_much_larger_than_the_models_own_is_cropped_and_a_larger_sample(
    visit: Visit,
) -> None:
    async with visit() as (page, _):
        await page.route(
            "**/v1/jobs", lambda route: route.continue_()
        )  # the browser tells bodies of routed requests
        crop, padding = page.locator("#crop"), page.locator("#padding")
        await open_picture(page, file(scene(384, 200)))
        await expect(crop).not_to_be_checked()  # 384 is 1.5 times the model's 256 and not more
        await expect(padding).to_be_disabled()
        await expect(page.locator("#crop-why")).to_be_hidden()
        await open_picture(page, file(scene(200, 385)))
        await expect(crop).to_be_checked()
        await expect(padding).to_have_value("32")
        await expect(page.locator("#crop-why")).to_contain_text("Best switched on here")
        await open_sample(page, "Add a star")
        await expect(crop).not_to_be_checked()
        await open_sample(page, "Astronaut")
        await expect(crop).to_be_checked()
        await expect(padding).to_have_value(str(PHOTOGRAPH_PADDING))
        await padding.fill("")
        await page.click("#go")
        await expect(page.locator("#padding-error")).to_have_text("How many pixels; 0 for none.")
        await padding.fill("48")
        async with page.expect_request("**/v1/jobs") as cropped:
            await edit(page, steps=2)
        await finished(page)
        assert b'name="padding_mask_crop"\r\n\r\n48\r\n' in ((await cropped.value).post_data_buffer or b"")
        await page.click("#use-result")
        await page.uncheck("#crop")
        await open_sample(page, "Coffee")
        await expect(crop).not_to_be_checked()
        await expect(page.locator("#crop-why")).to_be_visible()  # advice stays, and so does the choice
        async with page.expect_request("**/v1/jobs") as whole:
            await edit(page, steps=2)
        await finished(page)
        assert b"padding_mask_crop" not in ((await whole.value).post_data_buffer or b"")


@pytest.mark.parametrize(("native_px", "cropped"), [(511, True), (512, False)])
async def test_a_samples_margin_counts_where_the_sample_is_larger_than_the_models_own(
    visit: Visit, native_px: int, cropped: bool
) -> None:
    async def of_another_size(route: Route) -> None:
        answer = await route.fetch()
        models = await answer.json()
        models["data"][0]["native_size"] = native_px
        await route.fulfill(response=answer, json=models)

    async with visit() as (page, _):
        await page.route("**/v1/models", of_another_size)
        await page.reload()
        await open_sample(page, "Astronaut")
        await expect(page.locator("#crop")).to_be_checked(checked=cropped)
        await open_picture(page, file(scene(512, 512)))
        await expect(page.locator("#crop")).not_to_be_checked()
        await expect(page.locator("#padding")).to_have_value("32")
