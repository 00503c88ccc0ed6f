"""LoRAs and ControlNets on the studio page: chosen, uploaded, set, refused, told; a gateway in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.async_api import Page, expect

from giornata.wire.adapters import MAX_LORAS, ControlCard, ControlKind
from giornata.wire.errors import InvalidField
from giornata.wire.loras import LoraState
from giornata_gateway.views.jobs import ControlShare, ErrorDetail, LoraShare
from tests.e2e.studio.easel import file_of, finished, masked, ready
from tests.e2e.studio.gateway import (
    BLUE,
    FILL,
    GREEN,
    PAINTER,
    FakeGateway,
    Open,
    SentRequest,
    fleet,
    lora,
    plain,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

CACHING = FILL.model_copy(update={"step_caches": ("taylorseer",)})
LORAS = [
    lora(1, "rims"),
    lora(2, "unready", LoraState.VALIDATING),
    lora(3, "elsewhere", model="painter"),
    lora(4),
]
NETS = [
    ControlCard(name=name, digest="d", kind=ControlKind.FLUX, text_channels=8, modes=modes)
    for name, modes in (("outline", 0), ("union", 3))
]
TIMES = "\N{MULTIPLICATION SIGN}"
CONTROL, OTHER = plain(BLUE, 16), plain(GREEN, 16)


def lists(sent: SentRequest) -> dict[str, Any]:
    """The adapters of a form, by name."""
    return {name: json.loads(sent.fields[name]) for name in ("loras", "controlnets") if name in sent.fields}


async def choose_lora(page: Page, *names: str) -> None:
    for name in names:
        await page.select_option("#lora-choice", label=name)


async def choose_file(page: Page, data: bytes, number: int = 0) -> None:
    await page.locator("#controlnet-cards input[type=file]").nth(number).set_input_files(file_of(data))


async def texts(page: Page) -> list[str]:
    return await page.locator("#lora-choice option").all_inner_texts()


async def test_ready_loras_of_the_model_are_chosen_scaled_removed_and_sent_and_else_nothing(
    opened: Open,
) -> None:
    gateway = FakeGateway(models=[FILL, PAINTER], loras=LORAS)
    async with opened(gateway) as (page, _):
        await masked(page)
        await page.select_option("#model", "tiny")
        await expect(page.locator("#lora-section")).not_to_have_attribute("open", "")
        await expect(page.locator("#lora-choice")).to_be_hidden()
        await page.click("#go")
        await finished(page, 1)
        await expect(page.locator("#result-adapters")).to_be_hidden()
        await page.click("#lora-section summary")
        await expect(page.locator("#lora-choice option")).to_have_count(3)
        assert await texts(page) == ["Choose a LoRA", "rims", "lora_00000000…"]
        await choose_lora(page, "rims", "lora_00000000…")
        await expect(page.locator("#lora-choice")).to_be_disabled()
        await page.get_by_role("slider", name="Scale of rims").fill("0.6")
        await expect(page.get_by_role("spinbutton", name="Scale of rims")).to_have_value("0.6")
        await page.get_by_role("button", name="Remove the LoRA lora_00000000…").click()
        await expect(page.locator("#lora-choice")).to_be_focused()
        await expect(page.locator("#lora-note")).to_have_text("1")
        await page.select_option("#lora-wait", "bounded")
        await page.click("#go")
        await finished(page, 2)
        await page.select_option("#model", "painter")
        await expect(page.locator("#lora-cards .card")).to_have_count(0)
        await page.click("#go")
        await finished(page, 3)
        await page.select_option("#model", "tiny")
        await expect(page.get_by_role("group", name="LoRA rims")).to_be_visible()
    unused, with_lora, without = gateway.sent
    assert not any("lora" in name or "control" in name for name in unused.fields)
    assert lists(with_lora) == {"loras": [{"id": LORAS[0].id, "scale": 0.6}]}
    assert with_lora.fields["lora_wait"] == "bounded"
    assert not {"loras", "lora_wait"} & without.fields.keys()


async def test_no_more_than_four_are_chosen_and_a_scale_beyond_is_refused(opened: Open) -> None:
    gateway = FakeGateway(loras=[lora(number, f"l{number}") for number in range(6)])
    async with opened(gateway) as (page, _):
        await masked(page)
        await page.click("#lora-section summary")
        await choose_lora(page, *(f"l{number}" for number in range(MAX_LORAS)))
        await expect(page.locator("#lora-choice")).to_be_disabled()
        await expect(page.locator("#lora-choice option").first).to_have_text("At most 4 act at a time")
        strength = page.get_by_role("spinbutton", name="Scale of l1")
        await strength.fill("-5")
        await page.click("#lora-section summary")
        await page.click("#go")
        await expect(strength).to_be_focused()
        await expect(page.get_by_role("group", name="LoRA l1")).to_contain_text("From -4 to 4.")
        await strength.fill("-4")
        await page.click("#go")
        await finished(page)
    assert [one["scale"] for one in lists(gateway.sent[0])["loras"]] == [1, -4, 1, 1]


async def test_what_is_listed_anew_does_not_take_the_focus_away(opened: Open) -> None:
    gateway = FakeGateway(loras=[lora(1, "rims")])
    async with opened(gateway) as (page, _):
        await ready(page)
        await page.click("#lora-section summary")
        await choose_lora(page, "rims")
        strength = page.get_by_role("spinbutton", name="Scale of rims")
        await page.click("#lora-section summary")
        gateway.loras = [lora(2, "later"), *gateway.loras]
        await page.evaluate("""() => {
            document.getElementById("lora-section").open = true;
            document.querySelector("#lora-cards input[type=number]").focus();
        }""")
        await expect(page.locator("#lora-choice option")).to_have_count(2)
        assert await texts(page) == ["Choose a LoRA", "later"]
        await expect(strength).to_be_focused()


async def test_a_long_list_is_told_page_by_page(opened: Open) -> None:
    others = [lora(number, f"other{number}", model="painter") for number in range(5)]
    gateway = FakeGateway(loras=[lora(8, "new"), *others, lora(9, "old"), lora(10, "oldest")], page=3)
    async with opened(gateway) as (page, _):
        await ready(page)
        await page.click("#lora-section summary")
        await expect(page.locator("#lora-choice option")).to_have_count(3)
        assert await texts(page) == ["Choose a LoRA", "new", "Show more"]
        await choose_lora(page, "Show more")
        await expect(page.locator("#lora-choice option")).to_have_count(4)
        assert await texts(page) == ["Choose a LoRA", "new", "old", "oldest"]


async def test_a_file_is_uploaded_checked_and_chosen_or_refused_with_the_reason(opened: Open) -> None:
    gateway = FakeGateway(uploaded=lora(7, "drawn"))
    async with opened(gateway) as (page, _):
        await ready(page)
        await page.click("#lora-section summary")
        await expect(page.locator("#lora-choice")).to_be_disabled()
        await expect(page.locator("#lora-choice option")).to_have_text("There is none of tiny yet")
        await page.set_input_files("#lora-file", file_of(b"weights", "drawn.safetensors"))
        await expect(page.locator("#lora-state")).to_have_text("drawn.safetensors is being checked")
        await expect(page.locator("#lora-upload")).to_be_disabled()
        gateway.checks.set()
        await expect(page.locator("#lora-state")).to_have_text("drawn.safetensors is ready")
        await expect(page.get_by_role("group", name="LoRA drawn")).to_be_visible()
        why = ErrorDetail(
            code="lora_mismatch", message="It is for another model.", type="invalid_request_error"
        )
        gateway.uploaded = lora(6, "bad", LoraState.FAILED).model_copy(update={"error": why})
        await page.set_input_files("#lora-file", file_of(b"weights", "bad.safetensors"))
        await expect(page.locator("#lora-state")).to_have_text("bad.safetensors is refused")
        await expect(page.locator("#lora-error")).to_have_text("It is for another model. lora_mismatch")
        await expect(page.locator("#lora-upload")).to_be_enabled()
        await expect(page.locator("#lora-cards .card")).to_have_count(1)
    assert gateway.files[0] == {"model": "tiny", "file": b"weights"}


async def test_controlnets_see_a_file_or_the_picture_and_act_in_a_part_of_the_steps(opened: Open) -> None:
    gateway = FakeGateway(controlnets={"tiny": NETS})
    async with opened(gateway) as (page, _):
        await masked(page)
        await page.click("#controlnet-section summary")
        for name in ("union", "outline", "outline"):
            await page.select_option("#controlnet-choice", name)
        await expect(page.locator("#controlnet-choice")).to_be_disabled()
        union = page.get_by_role("group", name="ControlNet union")
        await page.click("#go")
        await expect(union).to_contain_text("Choose its control image.")
        await expect(union).to_contain_text("Choose which of its 3 kinds the control image is.")
        await choose_file(page, CONTROL)
        await expect(union.locator("img")).to_have_js_property("naturalWidth", 16)
        await page.get_by_role("combobox", name="Mode of union").select_option("2")
        await page.get_by_role("combobox", name="Sees of outline").first.select_option("picture")
        await choose_file(page, OTHER, 2)
        await page.get_by_role("combobox", name="Made into of outline").nth(1).select_option("tile")
        start = page.get_by_role("spinbutton", name="Start of union")
        await start.fill("0.5")
        await page.get_by_role("spinbutton", name="End of union").fill("0.5")
        await expect(union).to_contain_text("Start has to be below end, which is 0.5.")
        await page.click("#go")
        await expect(start).to_be_focused()
        await start.fill("0.25")
        assert gateway.sent == []
        await page.click("#go")
        await finished(page)
    [sent] = gateway.sent
    whole = {"scale": 1, "start": 0, "end": 1}
    assert lists(sent)["controlnets"] == [
        {"model": "union", "image": 0, "scale": 1, "start": 0.25, "end": 0.5, "mode": 2},
        {"model": "outline", "annotator": "canny", **whole},
        {"model": "outline", "image": 1, "annotator": "tile", **whole},
    ]
    assert sent.body.control_images == (CONTROL, OTHER)


async def test_a_controlnet_that_is_gone_is_not_left_out_unsaid(opened: Open) -> None:
    gateway = FakeGateway(controlnets={"tiny": NETS})
    async with opened(gateway) as (page, _):
        await masked(page)
        await page.click("#controlnet-section summary")
        await page.select_option("#controlnet-choice", "outline")
        await choose_file(page, CONTROL)
        await expect(page.locator("#fleet-note")).to_have_text("1 worker")
        gateway.become(controlnets={}, fleet=fleet("tiny", "another"))
        await expect(page.locator("#controlnet-choice option")).to_have_count(1)
        await page.click("#go")
        net = page.get_by_role("group", name="ControlNet outline")
        await expect(net).to_contain_text("outline is not served now. Wait for it, or remove it.")
        assert gateway.sent == []
        await page.get_by_role("button", name="Remove the ControlNet outline").click()
        await page.click("#go")
        await finished(page)
    assert "controlnets" not in gateway.sent[0].fields
    assert gateway.sent[0].body.control_images == ()


BLAMED = {
    "loras.0.scale": "[aria-label='LoRA rims'] .error",
    "loras": "#lora-error",
    "lora_wait": "#lora-wait-error",
    "controlnets.0.start": "[aria-label='ControlNet outline'] .error",
    "controlnets": "#controlnet-error",
    "control_image_0": "[aria-label='ControlNet outline'] .error",
    "step_cache": "#step-cache-error",
}
"""Where an error stands, by the field that it names."""


async def test_the_gateways_error_opens_the_section_and_stands_at_the_control_it_names(opened: Open) -> None:
    gateway = FakeGateway(models=[CACHING], loras=LORAS, controlnets={"tiny": NETS})
    sections = ("#lora-section", "#controlnet-section", "#speed")
    async with opened(gateway) as (page, watch):
        watch.expected.append("status of 400")
        await masked(page)
        for section in sections:
            await page.click(f"{section} summary")
        await choose_lora(page, "rims")
        await page.select_option("#controlnet-choice", "outline")
        await choose_file(page, CONTROL)
        await page.select_option("#step-cache", "taylorseer")
        for field, place in BLAMED.items():
            for section in sections:
                await page.eval_on_selector(section, "section => { section.open = false; }")
            gateway.refusals["/v1/jobs"] = InvalidField("No.", field=field)
            await page.click("#go")
            await expect(page.locator(f"{place}:visible")).to_have_text("No. invalid_field")
            await expect(page.locator("p.error:visible")).to_have_count(1)
        await expect(page.locator("#step-cache")).to_be_focused()
        gateway.refusals.clear()
        await page.click("#go")
        await finished(page)
        await expect(page.locator("p.error:visible")).to_have_count(0)


async def test_the_result_tells_its_adapters(opened: Open) -> None:
    used = (
        [LoraShare(id=LORAS[0].id, scale=0.5)],
        [ControlShare(model="outline", scale=1, start=0, end=0.6, mode=None)],
    )
    gateway = FakeGateway(loras=LORAS, used=used)
    async with opened(gateway) as (page, _):
        await masked(page)
        for edits, (since, told) in enumerate(
            ((0, ", from the first step"), (3, ", from step 4"), (None, "")), 1
        ):
            gateway.loras_from = since
            await page.click("#go")
            await finished(page, edits)
            await expect(page.locator("#result-adapters")).to_have_text(
                f"LoRA rims {TIMES} 0.5{told}; ControlNet outline {TIMES} 1 from 0 to 60 %"
            )
