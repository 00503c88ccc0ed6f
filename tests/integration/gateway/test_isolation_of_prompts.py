"""What one tenant's prompt leads to is its own: masks from words, LoRAs by name."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from giornata.bus.answering import Endpoint
from giornata.wire import subjects
from giornata.wire.errors import NothingFound
from giornata.wire.masks import MaskReply, MaskRequest
from giornata.wire.requests import EditParameters
from tests.fakes.colours import CARD as COLOURS
from tests.integration.fake_router import CARD
from tests.integration.gateway.attacking import (
    ALICES,
    MALLORYS,
    WORDS,
    Scene,
    bearer,
    blank,
    message,
    open_scene,
)
from tests.integration.gateway.test_a1111 import EDIT
from tests.integration.gateway.test_templates import edit


@pytest.fixture
async def scene(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Scene]:
    async with open_scene(nats_url, redis_url, tmp_path) as scene:
        yield scene


async def test_words_find_nothing_in_a_template_of_another(scene: Scene) -> None:
    stage, asked = scene.stage, list[MaskRequest]()

    async def look(request: MaskRequest) -> MaskReply:
        asked.append(request)
        raise NothingFound

    stage.router.masks, stage.router.hold = COLOURS, None
    finding = Endpoint(subjects.prepost("mask", CARD.name), MaskRequest, look)
    async with stage.router.bus.serve("prepost", finding, instance="masks"):
        await stage.router.announce()
        told = {"template_id": scene.alice.template_id, "mask_prompt": "the left shoe"}
        for more in ({}, {"auto_edit": "true"}):
            status, answer = await edit(stage, bearer(MALLORYS), None, **told, **more)
            assert (status, answer["error"]["code"]) == (404, "template_not_found")
        parameters = EditParameters(prompt="x", mask_prompt="the left shoe")
        sent = message(MALLORYS, image=None, template_id=scene.alice.template_id, parameters=parameters)
        answer = await scene.over_nats(subjects.EDIT, sent, f"{scene.mallorys_inbox}.a", {})
        assert answer["code"] == "template_not_found"
        assert asked == []
        status, answer = await edit(stage, bearer(ALICES), None, **told)
        assert (answer["error"]["code"], len(asked)) == ("nothing_found", 1), (
            "its owner's words are looked for"
        )


async def test_a_prompt_of_a1111_names_no_lora_of_another(scene: Scene) -> None:
    answers = []
    for name in (f"lora_{secrets.token_hex(16)}", scene.alice.lora_id, WORDS, f"{WORDS}.safetensors"):
        asked = EDIT | {"prompt": f"a <lora:{name}:1> star"}
        status, text, _ = await scene.told("POST", "/sdapi/v1/img2img", json=asked)
        assert status == 404
        answers.append(blank(text, name))
    assert all(answer == answers[0] for answer in answers)
