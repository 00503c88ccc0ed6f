"""ControlNets from denoisers' telemetry to what a job keeps of those that its request names."""

from __future__ import annotations

import pytest

from giornata.wire.adapters import Annotator, AskedControl, ControlCard, ControlInput, ControlKind
from giornata.wire.errors import GiornataError
from giornata.wire.models import ModelCard
from giornata.wire.workers import ServiceName, ServiceState
from giornata_gateway.fleet import FleetListener
from giornata_gateway.intake.rules.controls import control_use
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
    use = control_use(asked, CARD, SERVED)
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
        control_use(AskedControl.model_validate({"image": 0, **asked}), CARD, SERVED)
    assert raised.value.code == code
    assert sentence in raised.value.message
    assert raised.value.accepted == accepted


def test_a_model_that_is_served_without_any_says_so() -> None:
    with pytest.raises(GiornataError, match=f"{CARD.name}.*{CARD.family}") as raised:
        control_use(AskedControl(model="outline", image=0), CARD, {})
    assert raised.value.accepted == "no ControlNet; leave controlnets out"
