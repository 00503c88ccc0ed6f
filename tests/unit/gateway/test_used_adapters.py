"""ControlNets and LoRAs that a request names: which may be used, and what its job keeps of them."""

from __future__ import annotations

from typing import Any

import pytest

from giornata.wire.adapters import (
    Annotator,
    AskedControl,
    AskedLora,
    ControlCard,
    ControlInput,
    ControlKind,
    LoraUse,
    LoraWait,
)
from giornata.wire.errors import GiornataError, InvalidField, LoraUnreadable
from giornata.wire.loras import CanonicalLora, LoraRecord, LoraState, StoredFile
from giornata.wire.models import ModelCard, Task
from giornata.wire.workers import ServiceName, ServiceState
from giornata_gateway.fleet import FleetListener
from giornata_gateway.rules.adapters import check_images, control_use, in_order, use_of
from giornata_gateway.rules.forms import with_lists
from giornata_router.fleet_reports import summary
from tests.fakes.fleet import CARD, state_of

OUTLINE = ControlCard(name="outline", digest="o1", kind=ControlKind.FLUX, text_channels=32)
UNION = ControlCard(
    name="union", digest="u", kind=ControlKind.FLUX, text_channels=32, modes=3, sees=ControlInput.PIXELS
)
EDGES = ControlCard(name="edges", digest="e", kind=ControlKind.UNET, text_channels=768)
OTHER = CARD.model_copy(update={"name": "other", "digest": "other"})
SERVED = {CARD.name: (OUTLINE, UNION), OTHER.name: (EDGES,)}


def instance(
    name: str, service: ServiceName, card: ModelCard, *controlnets: ControlCard, draining: bool = False
) -> ServiceState:
    return state_of(service, name, models=(card,), controlnets=controlnets, draining=draining)


def told(*denoisers: ServiceState) -> dict[str, tuple[ControlCard, ...]]:
    prepost = [instance(f"p {card.name}", ServiceName.PREPOST, card) for card in (CARD, OTHER)]
    listener = FleetListener(5)
    listener.hear(summary("r", [*prepost, *denoisers]))
    return listener.controlnets()


def test_gateways_know_the_controlnets_of_ready_denoisers_by_model() -> None:
    known = told(
        instance("d1", ServiceName.DENOISER, CARD, UNION, OUTLINE),
        instance("d2", ServiceName.DENOISER, CARD, OUTLINE),
        instance("d3", ServiceName.DENOISER, OTHER, EDGES),
    )
    assert known == SERVED


def test_a_draining_denoiser_another_checkpoint_and_a_second_digest_add_none() -> None:
    stale = CARD.model_copy(update={"digest": "stale"})
    known = told(
        instance("d1", ServiceName.DENOISER, CARD, UNION, draining=True),
        instance("d2", ServiceName.DENOISER, CARD, OUTLINE.model_copy(update={"digest": "o2"})),
        instance("d3", ServiceName.DENOISER, CARD, OUTLINE),
        instance("d4", ServiceName.DENOISER, stale, EDGES),
        instance("d5", ServiceName.DENOISER, OTHER),
    )
    assert known == {CARD.name: (OUTLINE,)}


def test_a_job_keeps_what_was_asked_and_what_the_card_tells() -> None:
    asked = AskedControl(
        model="union", image=1, annotator=Annotator.CANNY, scale=0.5, start=0.1, end=0.9, mode=2
    )
    use = control_use(asked, CARD, SERVED, Task.GENERATE)
    assert use.model_dump() == asked.model_dump() | {"digest": "u", "sees": ControlInput.PIXELS}


@pytest.mark.parametrize(
    ("asked", "code", "sentence", "accepted"),
    [
        ({"model": "none"}, "controlnet_not_found", "without the ControlNet none", "outline, union"),
        ({"model": "edges"}, "controlnet_not_found", "belongs to other", "outline, union"),
        ({"model": "union"}, "invalid_field", "needs a mode", "0 to 2"),
        ({"model": "union", "mode": 3}, "invalid_field", "needs a mode", "0 to 2"),
        ({"model": "outline", "mode": 0}, "invalid_field", "no union", "leave mode out"),
    ],
)
def test_a_controlnet_that_cannot_act_is_refused(
    asked: dict[str, object], code: str, sentence: str, accepted: str
) -> None:
    with pytest.raises(GiornataError) as raised:
        control_use(AskedControl.model_validate({"image": 0, **asked}), CARD, SERVED, Task.EDIT)
    assert raised.value.code == code
    assert sentence in raised.value.message
    assert raised.value.accepted == accepted


def test_a_model_that_is_served_without_any_says_so() -> None:
    with pytest.raises(GiornataError, match=f"{CARD.name}.*{CARD.family}") as raised:
        control_use(AskedControl(model="outline", image=0), CARD, {}, Task.EDIT)
    assert raised.value.accepted == "no ControlNet; leave controlnets out"


@pytest.mark.parametrize(
    ("asked", "count", "task", "field"),
    [
        ([{"model": "outline", "image": 1}], 1, Task.EDIT, "control_image_1"),
        ([{"model": "outline", "annotator": "canny"}], 1, Task.EDIT, "control_image_0"),
        ([{"model": "outline", "image": 0}, {"model": "union", "image": 2}], 3, Task.EDIT, "control_image_1"),
        ([], 1, Task.GENERATE, "control_image_0"),
        ([{"model": "outline", "annotator": "canny"}], 0, Task.GENERATE, "controlnets.image"),
    ],
)
def test_each_control_image_is_there_and_is_seen(
    asked: list[dict[str, object]], count: int, task: Task, field: str
) -> None:
    with pytest.raises(InvalidField) as raised:
        check_images([AskedControl.model_validate(one) for one in asked], count, task)
    assert raised.value.field == field


def test_two_controlnets_may_see_one_image_and_one_the_edited_picture() -> None:
    asked = [{"model": "a", "image": 0}, {"model": "b", "image": 0, "annotator": "canny"}]
    check_images([AskedControl.model_validate(one) for one in asked], 1, Task.GENERATE)
    check_images([AskedControl.model_validate({"model": "a", "annotator": "tile"})], 0, Task.EDIT)
    check_images([], 0, Task.EDIT)


def test_control_images_are_numbered_from_0_on() -> None:
    files = {"mask": b"m", "control_image_1": b"1", "control_image_0": b"0", "image": b"i"}
    assert in_order(files) == (b"0", b"1")
    assert in_order({"image": b"i"}) == ()
    with pytest.raises(InvalidField, match="from 0 on") as raised:
        in_order({"control_image_1": b"1"})
    assert raised.value.field == "control_image_0"


def test_one_that_sees_the_mask_needs_an_edit() -> None:
    net = OUTLINE.model_copy(update={"kind": ControlKind.SD3, "sees": ControlInput.MASKED})
    asked, served = AskedControl(model="outline", image=0), {CARD.name: (net,)}
    assert control_use(asked, CARD, served, Task.EDIT).sees is ControlInput.MASKED
    with pytest.raises(InvalidField, match="a generation has none"):
        control_use(asked, CARD, served, Task.GENERATE)


def test_one_of_a_unet_sees_what_is_usual_there() -> None:
    """Which is pixels, as prepost knows of the family; the job needs no word of it."""
    use = control_use(AskedControl(model="edges", image=0), OTHER, SERVED, Task.GENERATE)
    assert (use.digest, use.sees) == ("e", ControlInput.USUAL)


ID = f"lora_{'a' * 32}"
READY = LoraRecord(
    lora_id=ID,
    tenant="alice",
    created_s=0,
    state=LoraState.READY,
    model=CARD.name,
    canonical=CanonicalLora(
        file=StoredFile(sha256="c" * 64, size_bytes=1234),
        model_digest=CARD.digest,
        rank=16,
        modules=40,
        text_modules=3,
        weights=500,
    ),
)


def test_a_job_keeps_what_rows_and_prepost_need() -> None:
    assert use_of(AskedLora(id=ID, scale=0.5), READY, CARD, LoraWait.EXACT) == LoraUse(
        lora_id=ID,
        sha256="c" * 64,
        size_bytes=1234,
        rank=16,
        modules=40,
        text_modules=3,
        weights=500,
        scale=0.5,
    )


@pytest.mark.parametrize(
    ("wait", "allowed", "scale", "within"),
    [
        (LoraWait.BOUNDED, 0.25, 1.0, 0.25),
        (LoraWait.BOUNDED, 0.25, 0.0, 0.25),
        (LoraWait.BOUNDED, 0.25, 1.01, 0.0),
        (LoraWait.BOUNDED, 0.25, -0.5, 0.0),
        (LoraWait.BOUNDED, None, 1.0, 0.0),
        (LoraWait.EXACT, 0.25, 1.0, 0.0),
    ],
)
def test_rows_begin_without_it_where_the_request_the_record_and_its_scale_allow_that(
    wait: LoraWait, allowed: float | None, scale: float, within: float
) -> None:
    """One that acts more strongly than its profile knows is waited for."""
    record = READY.model_copy(update={"joins_within": allowed})
    assert use_of(AskedLora(id=ID, scale=scale), record, CARD, wait).joins_within == within


def test_a_request_may_tell_the_step() -> None:
    record = READY.model_copy(update={"joins_within": 0.25})
    for share in (0.0, 0.5):
        use = use_of(AskedLora(id=ID, scale=2.0), record, CARD, LoraWait.EXACT, share)
        assert use.joins_within == share


@pytest.mark.parametrize(
    ("changed", "code", "told"),
    [
        ({"state": LoraState.VALIDATING, "canonical": None}, "lora_not_ready", "validating"),
        ({"state": LoraState.UPLOADING, "canonical": None, "model": None}, "lora_not_ready", "uploading"),
        (
            {"state": LoraState.FAILED, "canonical": None, "error": LoraUnreadable("It ends early.").body()},
            "lora_not_ready",
            "It ends early. ",
        ),
        ({"model": "other"}, "lora_mismatch", f"for the model other, and the request for {CARD.name}"),
    ],
)
def test_a_lora_that_cannot_act_is_refused(changed: dict[str, Any], code: str, told: str) -> None:
    with pytest.raises(GiornataError) as raised:
        use_of(AskedLora(id=ID), READY.model_copy(update=changed), CARD, LoraWait.EXACT)
    assert (raised.value.code, raised.value.field) == (code, "loras")
    assert told in str(raised.value)


def test_a_lora_of_another_checkpoint_of_the_same_name_is_refused() -> None:
    with pytest.raises(GiornataError, match="another checkpoint") as raised:
        use_of(AskedLora(id=ID), READY, CARD.model_copy(update={"digest": "e" * 64}), LoraWait.EXACT)
    assert raised.value.code == "lora_mismatch"
    assert "e" * 12 in str(raised.value.accepted)


def test_lists_of_a_form_are_json() -> None:
    written = {"prompt": "[1]", "loras": f'[{{"id": "{ID}", "scale": 0.5}}]'}
    assert with_lists(written) == {"prompt": "[1]", "loras": [{"id": ID, "scale": 0.5}]}
    assert with_lists({"loras": [{"id": ID}]}) == {"loras": [{"id": ID}]}
    assert with_lists({"prompt": "x"}) == {"prompt": "x"}


@pytest.mark.parametrize("text", ["", "lora_x", "[", "[NaN]", "[" * 100_000, "{'id': 1}"])
def test_lists_that_are_no_json_are_refused(text: str) -> None:
    with pytest.raises(GiornataError, match="loras is not JSON") as raised:
        with_lists({"loras": text})
    assert raised.value.field == "loras"
    assert len(str(raised.value)) < 500
