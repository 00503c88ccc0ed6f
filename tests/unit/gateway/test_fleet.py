"""What the fleet does together: from telemetry, and unknown without it."""

from __future__ import annotations

import pytest

from giornata.fleet import SILENCE_S
from giornata.wire.messages import MaskCard
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
from giornata_gateway.metrics import Metrics
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
