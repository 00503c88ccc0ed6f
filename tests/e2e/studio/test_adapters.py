"""LoRAs and ControlNets on the studio page: chosen, uploaded, set, refused, told; a gateway inside the browser."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest
from playwright.async_api import FilePayload, Page, Route, expect

from giornata.wire.adapters import MAX_LORAS, ControlCard, ControlKind
from giornata.wire.loras import LoraState
from giornata_gateway.views.answers import ErrorAnswer, ErrorDetail
from giornata_gateway.views.jobs import ControlShare, LoraShare
from tests.e2e.studio.browsing import screenshot
from tests.e2e.studio.easel import finished, masked, ready
from tests.e2e.studio.gateway import BLUE, FILL, GREEN, PAINTER, FakeGateway, Open, fleet, lora, plain

pytestmark = pytest.mark.asyncio(loop_scope="module")

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


def sent(form: bytes) -> dict[str, Any]:
    """Lists of a form, by name."""
    found = re.findall(rb'name="(loras|controlnets)"\r\n\r\n([^\r]*)', form)
    return {name.decode(): json.loads(text) for name, text in found}


async def choose_lora(page: Page, *names: str) -> None:
    for name in names:
        await page.select_option("#lora-choice", label=name)


async def choose_file(page: Page, data: bytes, number: int = 0) -> None:
    file = FilePayload(name=f"{number}.png", mimeType="image/png", buffer=data)
    await page.locator("#controlnet-cards input[type=file]").nth(number).set_input_files(file)


def weights(name: str) -> FilePayload:
    return FilePayload(name=f"{name}.safetensors", mimeType="application/octet-stream", buffer=b"weights")


async def texts(page: Page) -> list[str]:
    return await page.locator("#lora-choice option").all_inner_texts()


async def test_somebody_who_uses_none_sees_two_closed_lines_and_sends_nothing(opened: Open) -> None:
    gateway = FakeGateway(loras=LORAS)
    async with opened(gateway) as (page, _):
        await masked(page)
        await expect(page.locator("#lora-section")).not_to_have_attribute("open", "")
        await expect(page.locator("#lora-choice")).to_be_hidden()
        await expect(page.locator("#controlnet-section")).to_be_hidden()
        await page.click("#go")
        await finished(page)
        await expect(page.locator("#result-adapters")).to_be_hidden()
    assert b"lora" not in gateway.forms[0]
    assert b"control" not in gateway.forms[0]


async def test_ready_loras_of_the_model_are_chosen_scaled_removed_and_sent(opened: Open) -> None:
    gateway = FakeGateway(models=[FILL, PAINTER], loras=LORAS)
    async with opened(gateway) as (page, _):
        await masked(page)
        await page.select_option("#model", "tiny")
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
        await finished(page)
        await page.select_option("#model", "painter")
        await expect(page.locator("#lora-cards .card")).to_have_count(0)
        await page.click("#go")
        await expect(page.locator("#visit-strip button")).to_have_count(2)
        await page.select_option("#model", "tiny")
        await expect(page.get_by_role("group", name="LoRA rims")).to_be_visible()
    with_lora, without = gateway.forms
    assert sent(with_lora) == {"loras": [{"id": LORAS[0].id, "scale": 0.6}]}
    assert b'name="lora_wait"\r\n\r\nbounded\r\n' in with_lora
    assert b"lora" not in without


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
    assert [one["scale"] for one in sent(gateway.forms[0])["loras"]] == [1, -4, 1, 1]


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
        await page.set_input_files("#lora-file", weights("drawn"))
        await expect(page.locator("#lora-state")).to_have_text("drawn.safetensors is being checked")
        await expect(page.locator("#lora-upload")).to_be_disabled()
        gateway.checks.set()
        await expect(page.locator("#lora-state")).to_have_text("drawn.safetensors is ready")
        await expect(page.get_by_role("group", name="LoRA drawn")).to_be_visible()
        why = ErrorDetail(
            code="lora_mismatch", message="It is for another model.", type="invalid_request_error"
        )
        gateway.uploaded = lora(6, "bad", LoraState.FAILED).model_copy(update={"error": why})
        await page.set_input_files("#lora-file", weights("bad"))
        await expect(page.locator("#lora-state")).to_have_text("bad.safetensors is refused")
        await expect(page.locator("#lora-error")).to_contain_text("It is for another model.")
        await expect(page.locator("#lora-error code")).to_have_text("lora_mismatch")
        await expect(page.locator("#lora-upload")).to_be_enabled()
        await expect(page.locator("#lora-cards .card")).to_have_count(1)
    assert b'name="model"\r\n\r\ntiny\r\n' in gateway.files[0]
    assert b"weights" in gateway.files[0]


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
        await screenshot(page, "controlnets")
        assert gateway.forms == []
        await page.click("#go")
        await finished(page)
    [form] = gateway.forms
    whole = {"scale": 1, "start": 0, "end": 1}
    assert sent(form)["controlnets"] == [
        {"model": "union", "image": 0, "scale": 1, "start": 0.25, "end": 0.5, "mode": 2},
        {"model": "outline", "annotator": "canny", **whole},
        {"model": "outline", "image": 1, "annotator": "tile", **whole},
    ]
    parts = dict(re.findall(rb'name="(control_image_\d)".*?\r\n\r\n(.*?)\r\n--', form, re.DOTALL))
    assert parts == {b"control_image_0": CONTROL, b"control_image_1": OTHER}


async def test_a_controlnet_that_is_gone_is_not_left_out_unsaid(opened: Open) -> None:
    gateway = FakeGateway(controlnets={"tiny": NETS})
    async with opened(gateway) as (page, _):
        await masked(page)
        await page.click("#controlnet-section summary")
        await page.select_option("#controlnet-choice", "outline")
        await choose_file(page, CONTROL)
        gateway.controlnets, gateway.fleet = {}, fleet("tiny", "another")
        await expect(page.locator("#controlnet-choice option")).to_have_count(1)
        await page.click("#go")
        net = page.get_by_role("group", name="ControlNet outline")
        await expect(net).to_contain_text("outline is not served now. Wait for it, or remove it.")
        assert gateway.forms == []
        await page.get_by_role("button", name="Remove the ControlNet outline").click()
        await page.click("#go")
        await finished(page)
    assert b"control" not in gateway.forms[0]


async def test_a_generation_follows_files_alone(opened: Open) -> None:
    gateway = FakeGateway(models=[PAINTER], controlnets={"painter": NETS})
    async with opened(gateway) as (page, _):
        await ready(page)
        await page.click("#controlnet-section summary")
        await page.select_option("#controlnet-choice", "outline")
        await page.get_by_role("combobox", name="Sees of outline").select_option("picture")
        await page.get_by_role("button", name="From text").click()
        await expect(page.get_by_role("combobox", name="Sees of outline").locator("option")).to_have_count(1)
        await choose_file(page, CONTROL)
        await page.fill("#prompt", "a red barn")
        await page.click("#go")
        await finished(page)
    asked = json.loads(gateway.forms[0])
    (net,) = asked["controlnets"]
    assert net["image"] == 0
    assert "annotator" not in net, "a file is taken as it is, unless a person says otherwise"
    assert base64.b64decode(asked["control_image_0"].split(",")[1]) == CONTROL


@pytest.mark.parametrize(
    ("param", "place"),
    [
        ("loras.0.scale", "[aria-label='LoRA rims'] .error"),
        ("loras", "#lora-error"),
        ("lora_wait", "#lora-wait-error"),
        ("controlnets.0.start", "[aria-label='ControlNet outline'] .error"),
        ("controlnets", "#controlnet-error"),
        ("control_image_0", "[aria-label='ControlNet outline'] .error"),
    ],
)
async def test_the_gateways_error_stands_at_the_adapter_it_names(
    opened: Open, param: str, place: str
) -> None:
    async def refuse(route: Route) -> None:
        why = ErrorDetail(
            code="invalid_field", message=f"{param}: No.", type="invalid_request_error", param=param
        )
        await route.fulfill(
            status=400, body=ErrorAnswer(error=why).model_dump_json(), content_type="application/json"
        )

    async with opened(FakeGateway(loras=LORAS, controlnets={"tiny": NETS})) as (page, watch):
        watch.expected.append("status of 400")
        await masked(page)
        for section in ("lora", "controlnet"):
            await page.click(f"#{section}-section summary")
        await choose_lora(page, "rims")
        await page.select_option("#controlnet-choice", "outline")
        await choose_file(page, CONTROL)
        for section in ("lora", "controlnet"):
            await page.click(f"#{section}-section summary")
        await page.route("**/v1/jobs", refuse)
        await page.click("#go")
        await expect(page.locator(f"{place}:visible")).to_have_text("No. invalid_field")
        await expect(page.locator("#edit-error")).to_be_hidden()
        await page.unroute("**/v1/jobs")
        await page.click("#go")
        await finished(page)
        await expect(page.locator(f"{place}:visible")).to_have_count(0)


@pytest.mark.parametrize(
    ("loras_from", "since"), [(0, "from the first step"), (3, "from step 4"), (None, None)]
)
async def test_the_result_tells_its_adapters(opened: Open, loras_from: int | None, since: str | None) -> None:
    used = (
        [LoraShare(id=LORAS[0].id, scale=0.5)],
        [ControlShare(model="outline", scale=1, start=0, end=0.6, mode=None)],
    )
    async with opened(FakeGateway(loras=LORAS, used=used, loras_from=loras_from)) as (page, _):
        await masked(page)
        await page.click("#go")
        await finished(page)
        told = f"LoRA rims {TIMES} 0.5" + (f", {since}" if since else "")
        await expect(page.locator("#result-adapters")).to_have_text(
            f"{told}; ControlNet outline {TIMES} 1 from 0 to 60 %"
        )
