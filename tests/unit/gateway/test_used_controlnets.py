"""ControlNets from denoisers' telemetry to what a job keeps of those that its request names."""

from __future__ import annotations

import pytest

from giornata.wire.adapters import Annotator, AskedControl, ControlCard, ControlInput, ControlKind
from giornata.wire.errors import GiornataError, InvalidField
from giornata.wire.models import ModelCard, Task
from giornata.wire.workers import ServiceName, ServiceState
from giornata_gateway.fleet import FleetListener
from giornata_gateway.intake.rules.controls import check_images, control_use, in_order
from giornata_router.rules.reports import summary
from tests.fakes.fleet import CARD

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
    return ServiceState(
        service=service,
        instance=name,
        host="h",
        version="1",
        ready=True,
        draining=draining,
        models=(card,),
        controlnets=controlnets,
    )


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
