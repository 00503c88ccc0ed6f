"""The fleet table, from what the gateway tells."""

from __future__ import annotations

from rich.console import Console

from giornata.wire.adapters import ControlCard, ControlKind
from giornata.wire.controlnets import ControlState
from giornata.wire.devices import HostDevice
from giornata.wire.fleet import FleetView
from giornata.wire.host_tiers import HostTier, TierChange, TierLoads
from giornata.wire.queues import QueueState, StoreRoom
from giornata.wire.workers import (
    AdapterCounters,
    RankPhase,
    RankState,
    RowProgress,
    ServiceName,
    ServiceState,
    TemplateCounters,
    WorkerState,
)
from giornata_gateway.views.fleet import fleet_view
from giornata_router.rules.reports import StepRates, report
from giornata_tools.cli.adapter_table import adapter_table
from giornata_tools.cli.status import fleet_table, sums
from tests.contract.messages import CARD


def state(service: ServiceName, instance: str, **more: object) -> ServiceState:
    told = {"service": service, "instance": instance, "host": "h", "version": "1", "ready": True, **more}
    return ServiceState.model_validate(told)


def row(step: int) -> RowProgress:
    return RowProgress(job_id="j", attempt=1, index=0, step=step, steps=8, tokens=64)


BUSY = WorkerState(capacity_rows=4, capacity_tokens=1024, running=(row(2),), waiting=(row(0), row(0)))
STATES = [
    state(ServiceName.DENOISER, "d1", models=(CARD,), worker=BUSY),
    state(ServiceName.GATEWAY, "g1", draining=True),
    state(ServiceName.PREPOST, "p1", ready=False),
    state(ServiceName.ROUTER, "r1", queue=QueueState(jobs=3, rows=5, steps=40)),
    state(ServiceName.ROUTER, "r2", active=False),
]


def told(states: list[ServiceState]) -> FleetView:
    """As it travels: unknown numbers are left out in the stream, and null in the answer."""
    view = fleet_view([report(one, StepRates(), 0.0) for one in states])
    read = FleetView.model_validate_json(view.model_dump_json(exclude_none=True))
    assert read == FleetView.model_validate_json(view.model_dump_json())
    return read


def rendered(fleet: FleetView) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(fleet_table(fleet))
    return [line.split() for line in capture.get().splitlines()]


def test_every_instance_has_a_line_with_its_state() -> None:
    lines = rendered(told(STATES))
    assert lines[1:6] == [
        ["denoiser", "d1", "ready", "1", "2", "1", "?", "?", CARD.name],
        ["gateway", "g1", "draining"],
        ["prepost", "p1", "starting"],
        ["router", "r1", "ready"],
        ["router", "r2", "standby"],
    ]


def test_a_controlnet_service_has_a_line_with_its_rows_and_nets() -> None:
    card = ControlCard(name="edges", digest="d", kind=ControlKind.FLUX, text_channels=8)
    busy = state(
        ServiceName.CONTROLNET, "c1", controlnets=(card,), control=ControlState(capacity_rows=4, rows=3)
    )
    assert rendered(told([busy]))[1] == ["controlnet", "c1", "ready", "3", "1", "edges"]


def test_the_sums_say_what_is_unknown() -> None:
    line = sums(told(STATES))
    assert "1 running, 2 waiting" in line
    assert "free places: 1" in line
    assert "queued jobs: 3 (5 pictures)" in line
    assert "steps/s: ?" in line
    assert "queued jobs: ?;" in sums(told(STATES[:2]))


def test_an_empty_fleet_is_a_sentence() -> None:
    assert sums(told([])) == "No service tells of itself."


def test_templates_of_all_workers_are_summed_up() -> None:
    counted = BUSY.model_copy(
        update={"templates": TemplateCounters(hits_memory=3, hits_disk=1, misses=2, memory_bytes=3 << 20)}
    )
    workers = [state(ServiceName.DENOISER, name, worker=counted) for name in ("d1", "d2")]
    assert sums(told(workers)).splitlines()[2] == (
        "edits that could reuse: 12, 6 from memory, 2 from disk, 0 from an earlier edit; "
        "templates: 6 MiB in memory, 0 MiB on disk"
    )
    assert "templates:" not in sums(told(STATES))


def test_an_instance_has_a_line_with_its_gpus_and_whether_it_has_claimed_them() -> None:
    gpus = tuple(HostDevice(device=f"cuda:{index}", id=f"GPU-{index}f", claimed=True) for index in (2, 5))
    sharing = [
        state(ServiceName.DENOISER, "d1", worker=BUSY, gpus=gpus),
        state(ServiceName.PREPOST, "p1", gpus=(HostDevice(device="cuda:0", id="GPU-2f"),)),
        state(ServiceName.PREPOST, "p2"),
    ]
    assert sums(told(sharing)).splitlines()[2:] == [
        "claimed by d1: cuda:2 GPU-2f, cuda:5 GPU-5f",
        "used by p1: cuda:0 GPU-2f",
    ]


def test_a_pool_has_a_line_with_its_devices() -> None:
    ranks = (
        RankState(device="cuda:0", phase=RankPhase.READY, busy=True),
        RankState(device="cuda:1", phase=RankPhase.READY),
        RankState(device="cuda:2", phase=RankPhase.LOADING, starts=2),
    )
    pool = state(ServiceName.DENOISER, "d1", worker=BUSY.model_copy(update={"ranks": ranks}))
    assert sums(told([pool])).splitlines()[2:] == [
        "pool d1: cuda:0 busy, cuda:1 ready, cuda:2 loading (started 2 times)"
    ]


def test_a_stream_that_is_nearly_full_is_named() -> None:
    rooms = [
        StoreRoom(store=name, used_bytes=used << 20, limit_bytes=100 << 20)
        for name, used in (("a", 79), ("b", 80))
    ]
    lines = sums(told([state(ServiceName.ROUTER, "r1", stores=rooms)])).splitlines()
    assert lines[2:] == ["nearly full: b, 80 of 100 MiB"]


def test_a_model_that_lacks_a_service_is_named() -> None:
    other = CARD.model_copy(update={"name": "other"})
    serving = [
        state(ServiceName.DENOISER, "d1", models=(CARD,)),
        state(ServiceName.DENOISER, "d2", models=(other,)),
        state(ServiceName.PREPOST, "p1", models=(CARD,)),
    ]
    lines = sums(told(serving)).splitlines()
    assert lines[2:] == ["not served: other, no prepost with it takes work"]
    whole = [*serving, state(ServiceName.PREPOST, "p2", models=(other,))]
    assert len(sums(told(whole)).splitlines()) == 2


def test_no_router_is_told_from_no_workers() -> None:
    assert "No router is active" in sums(fleet_view(None))
    assert "No router is active" not in sums(told([state(ServiceName.ROUTER, "r1")]))


def test_adapters_are_shown_by_host_and_worker_and_reason() -> None:
    tier = HostTier(
        name="rack-1",
        epoch=1,
        number=1,
        changes=(TierChange(number=1, sha256="ab", size_bytes=1),),
        budget_bytes=2_000_000_000,
        used_bytes=500_000_000,
        hits=11,
        loads=TierLoads(demand=7, ahead=5, plan=3, waited_ms=2500.0),
        evicted=2,
        failed=1,
        plans=4,
        plans_ignored=6,
        missing=9,
    )
    counts = AdapterCounters(
        hits_device=21, hits_memory=22, hits_disk=23, misses=24, prefetched=25, planned=26, waited_ms=1500.0
    )
    worker = BUSY.model_copy(update={"adapters": counts, "lora_host": "rack-1"})
    states = [
        state(ServiceName.LORA_STORE, "s1", host_tier=tier),
        state(ServiceName.DENOISER, "d1", worker=worker),
    ]
    fleet = told(states)
    (store,) = (one for one in fleet.instances if one.host_tier)
    assert store.host_tier is not None
    assert store.host_tier.changes == ()  # of no use to people
    console = Console(width=200)
    with console.capture() as capture:
        console.print(adapter_table(fleet))
    lines = [line.split() for line in capture.get().splitlines()]
    assert lines[1] == [
        "rack-1",
        "500",
        "2000",
        "9",
        "11",
        "7",
        "5",
        "3",
        "2.5",
        "2",
        "1",
        "4,",
        "6",
        "ignored",
    ]
    assert lines[4] == ["d1", "rack-1", "device", "0", "21", "0", "24", "25", "26", "1.5", "0"]
    assert lines[5] == ["memory", "0", "22", "0"]
    assert lines[6] == ["disk", "0", "23", "0"]


def test_without_adapters_the_table_says_so() -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(adapter_table(told([state(ServiceName.GATEWAY, "g1")])))
    assert "No LoRA store fills a host tier." in capture.get()
    assert "No worker tells of LoRAs." in capture.get()
