"""Tables of the fleet and of models, from what the gateway tells."""

from __future__ import annotations

from typing import Any

from rich.console import Console, RenderableType

from giornata.fleet import SILENCE_S
from giornata.wire.adapters import ControlCard, ControlKind
from giornata.wire.controlnets import ControlState
from giornata.wire.loras import HostTier, TierChange, TierLoads
from giornata.wire.models import Task
from giornata.wire.workers import (
    AdapterCounters,
    FleetView,
    HostDevice,
    QueueState,
    RankPhase,
    RankState,
    RowProgress,
    ServiceName,
    ServiceState,
    StepSample,
    StoreRoom,
    TemplateCounters,
    WorkerState,
)
from giornata_gateway.views.catalog import fleet_view, model_list
from giornata_router.fleet_reports import StepRates, report
from giornata_tools.cli.status import adapter_table, fleet_table, model_table, models_table, sums
from giornata_tools.cli.top import COLUMNS, WINDOW_S, CounterWindow, TelemetryAggregator, screen
from tests.contract.messages import CARD
from tests.fakes import fleet as fakes


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
        hits_device=21, hits_memory=22, hits_disk=23, misses=24, prefetched=25, waited_ms=1500.0
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
    assert lines[4] == ["d1", "rack-1", "device", "0", "21", "0", "24", "25", "1.5", "0"]
    assert lines[5] == ["memory", "0", "22", "0"]
    assert lines[6] == ["disk", "0", "23", "0"]


def running(index: int, computed: int | None) -> RowProgress:
    return RowProgress(
        job_id="j", attempt=1, index=index, step=1, steps=8, tokens=64, computed_tokens=computed
    )


def sample(rows: int, tokens: int, ms: float) -> StepSample:
    return StepSample(
        rows=rows,
        sequences=rows,
        image_tokens=tokens,
        text_tokens=0,
        attention_pairs=0,
        assemble_ms=0.0,
        step_ms=ms,
    )


def worker(
    steps: int, hits: int, samples: tuple[StepSample, ...] = (), name: str = "d1", **more: object
) -> ServiceState:
    told = WorkerState(
        capacity_rows=4,
        capacity_tokens=1024,
        running=(running(0, 16), running(1, None)),
        waiting=(running(2, None),),
        steps_total=steps,
        templates=TemplateCounters(hits_memory=hits, misses=1, memory_bytes=3_000_000),
        adapters=AdapterCounters(device_bytes=1_500_000),
        samples=samples,
    )
    fields = {"service": ServiceName.DENOISER, "instance": name, "host": "h", "version": "1", "ready": True}
    return ServiceState.model_validate({**fields, "worker": told, **more})


def router(active: bool = True) -> ServiceState:
    return ServiceState(
        service=ServiceName.ROUTER,
        instance="r1",
        host="h",
        version="1",
        ready=True,
        active=active,
        queue=QueueState(jobs=3, rows=5, steps=40, wait_ms=2500.0),
    )


def lines(seen: TelemetryAggregator, now: float) -> list[str]:
    console = Console(width=220)
    with console.capture() as capture:
        console.print(screen(seen.top(now)))
    return capture.get().splitlines()


def test_rates_are_those_of_the_counters_between_two_messages() -> None:
    seen = TelemetryAggregator()
    seen.hear(worker(100, 10), 1.0)
    seen.hear(worker(140, 12, (sample(2, 80, 20.0), sample(2, 80, 30.0))), 3.0)
    [one] = seen.top(3.0).workers
    assert one.steps_per_s == 20
    assert one.step_ms == 25
    assert one.tokens_per_s == 20 * 40, "40 tokens for each row's step"
    assert one.hits_per_s == {"memory": 1.0, "disk": 0.0, "first": 0.0, "none": 0.0}
    assert (one.running_rows, one.waiting_rows, one.free_rows) == (2, 1, 1)
    assert (one.computed_tokens, one.tokens) == (16 + 64, 128)


def test_what_one_message_cannot_tell_is_unknown() -> None:
    seen = TelemetryAggregator()
    seen.hear(worker(100, 10), 1.0)
    [one] = seen.top(1.0).workers
    assert (one.steps_per_s, one.step_ms, one.tokens_per_s) == (None, None, None)
    assert seen.top(1.0).total("steps_per_s") is None


def test_an_idle_worker_computes_no_tokens() -> None:
    seen = TelemetryAggregator()
    for now in (1.0, 2.0):
        seen.hear(worker(100, 10), now)
    assert seen.top(2.0).workers[0].tokens_per_s == 0


def test_rates_forget_what_is_older_than_the_window() -> None:
    counts = CounterWindow()
    for now in range(20):
        counts.add(float(now), {"steps": 0.0 if now < 10 else 6.0 * (now - 10)})
    assert counts.per_s("steps") == 6
    assert 19 - WINDOW_S >= 10
    assert counts.per_s("other") is None


def test_the_queue_is_the_active_routers_word() -> None:
    seen = TelemetryAggregator()
    seen.hear(router(active=False), 0.0)
    assert seen.top(0.0).queued_jobs is None
    seen.hear(router(), 0.0)
    told = seen.top(0.0)
    assert (told.queued_jobs, told.queued_rows, told.wait_s) == (3, 5, 2.5)


def test_who_falls_silent_is_left_out() -> None:
    seen = TelemetryAggregator()
    seen.hear(worker(1, 1), 0.0)
    seen.hear(worker(1, 1, name="d2"), SILENCE_S)
    assert [one.name for one in seen.top(SILENCE_S + 0.1).workers] == ["d2"]


def test_the_picture_has_sums_and_a_line_for_each_worker() -> None:
    seen = TelemetryAggregator()
    for now, steps in ((1.0, 100), (3.0, 140)):
        seen.hear(worker(steps, 10, (sample(2, 80, 20.0),)), now)
        seen.hear(worker(0, 0, name="d2", ready=False), now)
        seen.hear(router(), now)
    services, sums, _, head, first, second = lines(seen, 3.0)
    assert services == "ready: router 1/1, denoiser 1/2"
    assert sums == ("queue: 3 jobs, 5 pictures; wait: 2.5 s; running: 4 pictures, 20.0 steps/s, 800 tokens/s")
    assert head.split() == " ".join(COLUMNS).split()
    assert first.split() == [
        *("d1", "ready", "2", "1", "1", "20.0", "20.0", "80", "128", "800"),
        *("0.0", "0.0", "0.0", "0.0", "3.0", "0.0", "1.5"),
    ]
    assert second.split()[:2] == ["d2", "starting"]


# What ``giornata models`` prints.


PAINTER = fakes.CARD.model_copy(
    update={
        "name": "painter",
        "tasks": (Task.EDIT, Task.GENERATE),
        "generation_guidance_scale": 3.5,
        "generation_steps": 9,
        "samplers": ("euler", "heun"),
    }
)
TOLD: list[dict[str, Any]] = model_list({"tiny": fakes.CARD, "painter": PAINTER}, {}).model_dump(mode="json")[
    "data"
]


def table_lines(table: RenderableType) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return [line.split() for line in capture.get().splitlines() if line]


def test_every_model_has_a_line() -> None:
    lines = table_lines(models_table(TOLD))
    assert [line[:4] for line in lines[1:]] == [
        ["painter", "flux-fill", "edit,", "generate"],
        ["tiny", "flux-fill", "edit", "embedded"],
    ]
    assert table_lines(models_table([])) == [["No", "model", "is", "served."]]


def test_a_models_options_have_their_defaults_by_task() -> None:
    lines = table_lines(model_table(TOLD[0]))
    options = {line[0]: line[1:] for line in lines[3:-1]}
    assert lines[2] == ["option", "edit", "generate"]
    assert options["--num-inference-steps"] == ["4", "9"]
    assert options["--guidance-scale"] == ["30.0", "3.5"]
    assert options["--strength"] == ["1.0", "-"]
    assert options["--n"] == ["1", "1"]
    assert options["--prompt"] == ["required", "required"]
    assert "Undefined" not in str(lines)
    assert options["IN"] == ["-"]
    assert "--true-cfg-scale" not in options
    assert lines[-1] == ["samplers:", "euler,", "heun"]


def test_adapters_are_named_as_their_options_and_controlnets_by_name() -> None:
    nets = [
        ControlCard(name=name, digest="d", kind=ControlKind.FLUX, text_channels=8, modes=modes)
        for name, modes in (("outline", 0), ("union", 3))
    ]
    (told,) = model_list({"tiny": fakes.CARD}, {"tiny": nets}).model_dump(mode="json")["data"]
    lines = table_lines(model_table(told))
    options = {line[0]: line[1:] for line in lines[3:-2]}
    assert options["--lora"] == options["--controlnet"] == []
    assert options["--lora-wait"] == ["exact"]
    assert " ".join(lines[-1]) == "ControlNets: outline, union (mode 0 to 2)"
