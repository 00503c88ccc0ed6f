"""What the fleet does together, from telemetry, and which adapters of it a request may use."""

from __future__ import annotations

from typing import Any

import pytest

from giornata.fleet import SILENCE_S
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
from giornata.wire.messages import MaskCard
from giornata.wire.models import ModelCard, Task
from giornata.wire.workers import (
    FleetSummary,
    FleetView,
    QueueState,
    RowProgress,
    ServiceName,
    ServiceState,
    StoreRoom,
    WorkerState,
)
from giornata_gateway.fleet import FleetListener
from giornata_gateway.http.resources import FleetFrames
from giornata_gateway.jobs.resources import check_images, control_use, use_of
from giornata_gateway.metrics import Metrics
from giornata_gateway.rules.forms import in_order, with_lists
from giornata_gateway.views.catalog import fleet_view, mask_card
from giornata_router.fleet_reports import StepRates, report, summary
from tests.fakes.fleet import CARD, STEP, state_of
from tests.present import present

EMPTY = QueueState(wait_ms=0.0)


def row(left: int, index: int = 0) -> RowProgress:
    return RowProgress(job_id="j", attempt=1, index=index, step=10, steps=10 + left, tokens=16)


def worker(
    *running: int,
    waiting: tuple[int, ...] = (),
    capacity: int = 2,
    total: int = 0,
    step_ms: float | None = None,
) -> WorkerState:
    """Rows by the steps they have left; one sample of `step_ms`."""
    samples = () if step_ms is None else (STEP.model_copy(update={"step_ms": step_ms}),)
    return WorkerState(
        capacity_rows=capacity,
        capacity_tokens=99,
        running=tuple(row(left, i) for i, left in enumerate(running)),
        waiting=tuple(row(left, i) for i, left in enumerate(waiting)),
        steps_total=total,
        samples=samples,
    )


def denoiser(state: WorkerState) -> ServiceState:
    return state_of(ServiceName.DENOISER, "d1", models=(CARD,), worker=state)


def router(queue: QueueState | None, *, active: bool = True) -> ServiceState:
    return state_of(ServiceName.ROUTER, "r1", active=active, queue=queue)


def test_the_fleet_is_summed_up() -> None:
    rates = StepRates()
    states = [
        denoiser(worker(5, 9, waiting=(3,), capacity=4, total=40, step_ms=20)),
        router(QueueState(jobs=2, rows=3, wait_ms=1250.0)),
    ]
    rates.observe(denoiser(worker(5, total=20)), 0.0)
    rates.observe(states[0], 2.0)
    view = seen(states, rates, 2.0)
    assert (view.workers, view.running_rows, view.waiting_rows, view.free_rows) == (1, 2, 1, 1)
    assert (view.queued_jobs, view.queued_rows, view.steps_per_s) == (2, 3, 10)
    assert view.predicted_wait_s == 1.25, "as the router tells it"
    first = present(view.instances[0].worker)
    assert (first.step_ms, first.steps_per_s, first.capacity_rows) == (20, 10, 4)
    assert view.instances[1].worker is None


def test_what_nobody_told_is_unknown() -> None:
    view = seen([denoiser(worker()), router(None, active=False)])
    assert (view.queued_jobs, view.queued_rows, view.steps_per_s, view.predicted_wait_s) == (None,) * 4
    unknown = [denoiser(worker()), router(QueueState(jobs=1))]
    assert seen(unknown).predicted_wait_s is None
    assert seen([denoiser(worker()), router(EMPTY)]).predicted_wait_s == 0


def seen(states: list[ServiceState], rates: StepRates | None = None, now: float = 0.0) -> FleetView:
    return fleet_view([report(state, rates or StepRates(), now) for state in states])


def test_without_a_router_nothing_is_known() -> None:
    assert not fleet_view(None).router_active
    assert seen([]).router_active


def test_a_summary_tells_what_an_edit_can_be_done_with() -> None:
    other = CARD.model_copy(update={"name": "other"})
    renewed = CARD.model_copy(update={"digest": "e"})
    told = summary(
        "r1",
        [
            *(state_of(ServiceName.GATEWAY, f"g{number}") for number in range(4)),
            state_of(ServiceName.ROUTER, "r1"),
            state_of(ServiceName.ROUTER, "r2", active=False),
            state_of(ServiceName.PREPOST, "p1", models=(CARD,)),
            state_of(ServiceName.PREPOST, "p2", models=(other,), draining=True),
            state_of(ServiceName.DENOISER, "d1", models=(CARD,)),
            state_of(ServiceName.DENOISER, "d2", models=(other,)),
            state_of(ServiceName.DENOISER, "d3", models=(renewed,)),
            state_of(ServiceName.DENOISER, "d4", models=(CARD,), ready=False),
        ],
    )
    counts = {ServiceName.GATEWAY: 4, ServiceName.ROUTER: 2, ServiceName.PREPOST: 1, ServiceName.DENOISER: 3}
    assert told.ready == counts
    assert told.gateways == ("g0", "g1")
    assert told.models == (CARD,)


def test_a_summary_names_the_streams_that_its_router_finds_nearly_full() -> None:
    rooms = {
        name: StoreRoom(store=name, used_bytes=used, limit_bytes=100) for name, used in (("a", 79), ("b", 80))
    }
    leads = state_of(ServiceName.ROUTER, "r1", stores=tuple(rooms.values()))
    stands_by = state_of(ServiceName.ROUTER, "r2", active=False, stores=(rooms["a"],))
    told = summary("r1", [leads, stands_by])
    assert told.nearly_full == ("b",)
    fleet = FleetListener(bridged_s=60)
    assert fleet.nearly_full() == ()
    fleet.hear(told)
    assert fleet.nearly_full() == ("b",)


def test_what_autoscalers_ask_for_is_the_wait_that_routers_predict() -> None:
    fleet = FleetListener(bridged_s=60)
    fleet.hear(summary("r1", [state_of(ServiceName.ROUTER, "r1")], {"a": 2500.0, "b": 0.0}))
    text = Metrics(lambda: 0).exposition([], fleet.waits_s()).decode()
    for line in (
        'giornata_router_predicted_wait_seconds{model="a"} 2.5',
        'giornata_router_predicted_wait_seconds{model="b"} 0.0',
    ):
        assert line in text, line


def test_a_router_that_stays_away_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("giornata_gateway.fleet.time.monotonic", lambda: now_s)
    fleet = FleetListener(bridged_s=SILENCE_S + 1)
    fleet.hear(summary("r1", [], {CARD.name: 2000.0}))
    now_s += SILENCE_S
    assert (ServiceName.ROUTER in fleet.missing(), fleet.waits_s()) == (False, {CARD.name: 2.0})
    now_s += 1
    assert (fleet.missing(), fleet.waits_s()) == ([ServiceName.ROUTER], {})


def test_a_gateway_tells_no_router_from_no_workers() -> None:
    fleet = FleetListener(bridged_s=60)
    assert (fleet.missing(), fleet.cards()) == ([ServiceName.ROUTER], {})
    fleet.hear(
        summary(
            "r1", [state_of(ServiceName.PREPOST, "p1", models=(CARD,)), state_of(ServiceName.GATEWAY, "g1")]
        )
    )
    assert fleet.missing() == [ServiceName.DENOISER]
    assert (fleet.has_another("g1"), fleet.has_another("g2")) == (False, True)


def test_masks_from_words_are_served_where_a_prepost_tells_so() -> None:
    ours, other = MaskCard(name="ours", threshold=0.5), MaskCard(name="other", threshold=0.2)
    second = CARD.model_copy(update={"name": "second"})
    told = summary(
        "r1",
        [
            state_of(ServiceName.PREPOST, "p1", models=(CARD,)),
            state_of(ServiceName.PREPOST, "p2", models=(CARD,), masks=ours),
            state_of(ServiceName.PREPOST, "p3", models=(CARD,), masks=other),
            state_of(ServiceName.PREPOST, "p4", models=(second,), masks=other, draining=True),
        ],
    )
    assert told.masks == {CARD.name: other}
    fleet = FleetListener(bridged_s=60)
    assert fleet.masks() == {}
    fleet.hear(told.model_copy(update={"masks": {**told.masks, "second": ours}}))
    assert fleet.masks() == {CARD.name: other, "second": ours}
    assert mask_card(fleet.masks(), "second") == ours
    assert mask_card(fleet.masks(), "third") == mask_card(fleet.masks(), None) == ours
    assert mask_card({}, "tiny") is None
    older = told.model_dump(exclude={"masks"})
    fleet.hear(FleetSummary.model_validate(older))
    assert fleet.masks() == {}


def test_streams_that_are_told_the_same_share_a_frame() -> None:
    frames, reports = FleetFrames(), [report(denoiser(worker(3)), StepRates(), 0.0)]
    operator, tenant = frames.of(reports, None), frames.of(reports, 2)
    assert b"d1" in operator
    assert b"d1" not in tenant
    assert frames.of(reports, None) is operator
    assert frames.of(reports, 2) is tenant
    assert b'"running_rows":5' in frames.of(reports, 5)
    later = frames.of([report(denoiser(worker(3, 4)), StepRates(), 0.0)], None)
    assert later != operator
    assert b'"router_active":false' in frames.of(None, None)


# ControlNets and LoRAs that a request names: which may be used, and what its job keeps of them.


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
