"""Models, tasks, references and step caches on the studio page; a gateway in this process."""

from __future__ import annotations

import pytest
from playwright.async_api import Page, expect

from giornata.families import Family
from giornata.wire.adapters import ControlCard, ControlKind
from giornata.wire.models import DISCRETE_TIME
from tests.e2e.studio.easel import color_at, edit, file_of, finished, from_text, masked, ready
from tests.e2e.studio.gateway import (
    BLUE,
    FILL,
    GREEN,
    PAINTER,
    RED,
    FakeGateway,
    Open,
    SentRequest,
    fleet,
    plain,
    preview,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

CACHING = FILL.model_copy(update={"step_caches": ("taylorseer",)})
PLAIN = FILL.model_copy(update={"name": "plain"})
REFERRING = PAINTER.model_copy(
    update={"name": "klein", "family": Family.FLUX2_KLEIN, "references": 1, "max_references": 2}
)
PICTURES = [plain(color, 16) for color in (BLUE, GREEN, RED)]
QWEN = PAINTER.model_copy(
    update={"name": "qwen", "takes_guidance": False, "takes_true_cfg": True, "default_true_cfg_scale": 4.0}
)
UNET = PAINTER.model_copy(
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


async def controls(page: Page) -> set[str]:
    """Ids of the form's fields that are seen."""
    seen = "all => all.filter((one) => one.checkVisibility()).map(({ id }) => id)"
    return set(await page.eval_on_selector_all("#edit [name]", seen))


async def sizes(page: Page) -> list[str]:
    """The sizes that are offered."""
    return list(await page.eval_on_selector_all("#size option", "all => all.map(({ value }) => value)"))


async def test_a_picture_is_made_from_text_and_can_be_edited(opened: Open) -> None:
    gateway = FakeGateway(models=[PAINTER], pictures=2, events=preview(0, BLUE))
    gateway.ends.clear()
    async with opened(gateway) as (page, _):
        await from_text(page)
        assert await controls(page) == {"prompt", "size", "steps", "guidance", "seed", "n"}
        for hidden in ("#choose", "#crop"):
            await expect(page.locator(hidden)).to_be_hidden()
        await expect(page.locator("#guidance")).to_have_value("3.5")
        assert await sizes(page) == ["256x256", "304x208", "208x304", "336x192", "192x336"]
        await page.get_by_role("button", name="Generate", exact=True).click()
        await expect(page.locator("#prompt-error")).to_have_text("Write a prompt: what the picture shows.")
        await edit(page, prompt="a red barn", n=2, seed=11)
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
    [sent] = gateway.sent
    assert sent.fields == {
        "prompt": "a red barn",
        "num_inference_steps": 4,
        "guidance_scale": 3.5,
        "n": 2,
        "seed": 11,
        "size": "256x256",
        "partial_images": 8,
        "priority": "interactive",
    }


async def test_controls_are_those_of_the_chosen_model_and_task_on_the_narrowest_screen_too(
    opened: Open,
) -> None:
    gateway = FakeGateway(models=[FILL, PAINTER, QWEN, UNET])
    async with opened(gateway, viewport={"width": 360, "height": 860}) as (page, _):
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
            assert await page.evaluate("document.documentElement.scrollWidth") == 360
        await expect(page.locator("#reuse")).to_have_value("off")
        await expect(page.locator("#sampler")).to_have_value("pndm")
        await page.select_option("#sampler", "ddim")
        await page.select_option("#model", "qwen")
        await expect(page.locator("#reuse")).to_have_value("auto")
        await expect(page.locator("#true-cfg")).to_be_disabled()
        await page.fill("#negative", "snow")
        await page.fill("#strength", "0.5")
        await expect(page.locator("#true-cfg")).to_have_value("4")
        await edit(page, **{"true-cfg": 1})
        await expect(page.locator("#true-cfg")).to_be_focused()
        await page.select_option("#model", "sd")
        await expect(page.locator("#true-cfg-error")).to_be_hidden()
        await page.click("#go")
        await finished(page)
        await page.get_by_role("button", name="From text").click()
        assert await controls(page) == always | {"guidance", "negative", "sampler", "size"}
        await expect(page.locator("#steps")).to_have_value("9")
        assert await sizes(page) == ["128x128", "128x64", "64x128"]
    (sent,) = gateway.sent
    kept = {"negative_prompt": "snow", "sampler": "ddim", "strength": "0.5", "reuse": "off"}
    assert kept.items() <= sent.fields.items(), "what still applies is kept"
    assert "true_cfg_scale" not in sent.fields


async def test_a_chosen_model_is_kept_while_its_worker_restarts(opened: Open) -> None:
    one, two = (FILL.model_copy(update={"name": name}) for name in ("one", "two"))
    gateway = FakeGateway(models=[one, two], fleet=fleet("one", "two"))
    async with opened(gateway) as (page, _):
        await masked(page)
        await expect(page.locator("#fleet-note")).to_have_text("2 workers")
        await page.select_option("#model", "two")
        gateway.become(models=[one], fleet=fleet("one"))
        await expect(page.locator("#model-error")).to_contain_text("two is not served now")
        await expect(page.locator("#model")).to_have_value("two")
        await page.click("#go")
        await expect(page.locator("#model")).to_be_focused()
        assert gateway.sent == []
        gateway.become(models=[one, two], fleet=fleet("one", "two"))
        await expect(page.locator("#model-error")).to_be_hidden()
        await page.click("#go")
        await finished(page)
        assert gateway.sent[0].fields["model"] == "two"


async def test_references_are_added_removed_and_sent(opened: Open) -> None:
    async def add(*numbers: int) -> None:
        files = [file_of(PICTURES[number], f"{number}.png") for number in numbers]
        await page.set_input_files("#reference-file", files)

    gateway = FakeGateway(models=[REFERRING, FILL])
    async with opened(gateway) as (page, _):
        await masked(page)
        await page.select_option("#model", "klein")
        thumbs, told = page.locator("#reference-strip button"), page.locator("#reference-error")
        await page.set_input_files("#reference-file", file_of(b"x", "a.txt", "text/plain"))
        await expect(told).to_contain_text("“a.txt” is text/plain")
        await expect(thumbs).to_have_count(0)
        await add(0)
        await expect(thumbs).to_have_count(1)
        await add(1, 2)
        await expect(told).to_have_text("The model takes at most 2 references.")
        await expect(page.locator("#reference-note")).to_have_text("2 of at most 2")
        await expect(page.locator("#reference")).to_be_disabled()
        await page.get_by_role("button", name="Remove the reference 0.png").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("button", name="Remove the reference 1.png")).to_be_focused()
        await expect(page.locator("#reference")).to_be_enabled()
        await page.select_option("#model", "tiny")
        await expect(page.locator("#reference")).to_be_hidden()
        await page.click("#go")
        await finished(page)
        await page.select_option("#model", "klein")
        await page.click("#go")
        await finished(page, 2)
    assert [sent.body.references for sent in gateway.sent] == [(), (PICTURES[1],)]


def step_cache(sent: SentRequest) -> dict[str, str]:
    return {name: text for name, text in sent.fields.items() if name.startswith("step_cache")}


async def test_a_step_cache_is_asked_for_once_one_is_chosen(opened: Open) -> None:
    gateway = FakeGateway(models=[CACHING, PLAIN])
    async with opened(gateway) as (page, _):

        async def again(edits: int) -> None:
            await page.click("#go")
            await finished(page, edits)

        await masked(page)
        await page.select_option("#model", CACHING.name)
        await expect(page.locator("#speed")).not_to_have_attribute("open", "")
        await again(1)
        await page.focus("#speed summary")
        await page.keyboard.press("Enter")
        await page.keyboard.press("Tab")
        await expect(page.get_by_label("Step cache")).to_be_focused()
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("Tab")
        await expect(page.get_by_label("Interval")).to_be_focused()
        await again(2)
        await edit(page, interval=1)
        await expect(page.locator("#interval-error")).to_have_text("From 2 to 20.")
        await page.fill("#interval", "4")
        await page.fill("#warmup", "2")
        await again(3)
        await expect(page.locator("#step-cache option")).to_have_count(2)
        await page.select_option("#step-cache", "off")
        await expect(page.locator("#interval")).to_be_hidden()
        await page.select_option("#model", "plain")
        await expect(page.locator("#speed")).to_be_hidden()
        await again(4)
    assert [step_cache(sent) for sent in gateway.sent] == [
        {},
        {"step_cache": "taylorseer"},
        {"step_cache": "taylorseer", "step_cache_interval": "4", "step_cache_warmup": "2"},
        {},
    ]


async def test_a_generation_has_references_control_images_and_a_step_cache_too(opened: Open) -> None:
    model = REFERRING.model_copy(update={"step_caches": ("taylorseer",)})
    net = ControlCard(name="outline", digest="d", kind=ControlKind.FLUX, text_channels=8, modes=0)
    gateway = FakeGateway(models=[model], controlnets={"klein": [net]})
    async with opened(gateway) as (page, _):
        await ready(page)
        await page.click("#controlnet-section summary")
        await page.select_option("#controlnet-choice", "outline")
        sees = page.get_by_role("combobox", name="Sees of outline")
        await sees.select_option("picture")
        await from_text(page, "a red barn")
        await expect(sees.locator("option")).to_have_count(1)
        await page.locator("#controlnet-cards input[type=file]").set_input_files(file_of(PICTURES[2]))
        await page.set_input_files("#reference-file", [file_of(data) for data in PICTURES[:2]])
        await expect(page.locator("#reference-strip button")).to_have_count(2)
        await page.click("#speed summary")
        await page.select_option("#step-cache", "taylorseer")
        await expect(page.locator("#speed-note")).to_have_text("1")
        await page.click("#go")
        await finished(page)
    [sent] = gateway.sent
    assert sent.body.references == tuple(PICTURES[:2])
    assert sent.body.control_images == (PICTURES[2],)
    assert step_cache(sent) == {"step_cache": "taylorseer"}
    [asked] = sent.fields["controlnets"]
    assert asked["image"] == 0
    assert "annotator" not in asked, "a file is taken as it is, unless a person says otherwise"
