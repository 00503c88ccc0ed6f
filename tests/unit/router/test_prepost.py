"""Stages go to live instances with room that serve the model, fairly between tenants; lost questions are noticed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.fleet import SILENCE_S, Fleet
from giornata.scheduling.queue import Key, QueuedJob, SchedulingParams
from giornata.wire.errors import DeadlineExceeded
from giornata.wire.jobs import Priority
from giornata.wire.models import ModelCard
from giornata.wire.workers import PrepostState, ServiceName, ServiceState
from giornata_router.prepost import (
    AHEAD_MS,
    RECENT_S,
    PrepostRequests,
    PrepostStage,
    StageCost,
    StageCosts,
    StagePlacement,
    Verb,
)
from tests.fakes.fleet import CARD, state_of

OTHER = CARD.model_copy(update={"digest": "e" * 64})
"""Another version of the same model."""
HEAVY, LIGHT = StageCost(images_ms=5000.0), StageCost(images_ms=10.0)


def prepost(name: str, *, processes: int = 2, card: ModelCard = CARD, draining: bool = False) -> ServiceState:
    shown = PrepostState(image_processes=processes)
    how = {"ready": not draining, "draining": draining, "models": (card,), "prepost": shown, "answering": ()}
    return state_of(ServiceName.PREPOST, name, **how)


def placement(*states: ServiceState) -> StagePlacement:
    fleet = Fleet()
    made = StagePlacement(fleet)
    for state in states:
        observe(made, fleet, state)
    return made


def observe(made: StagePlacement, fleet: Fleet, state: ServiceState, now: float = 0.0) -> None:
    fleet.observe(state, now)
    made.observe(state)


def stage(
    cost: StageCost = LIGHT,
    verb: Verb = "inspect",
    card: ModelCard = CARD,
    avoid: frozenset[str] = frozenset(),
) -> PrepostStage:
    return PrepostStage(verb, card.name, card.digest, cost, avoid)


def join(made: StagePlacement, job: str, asked: PrepostStage, tenant: str = "t", **claim: object) -> Key:
    return made.join(job, asked, SchedulingParams(tenant=tenant, **claim), 0.0)  # type: ignore[arg-type]  # fields of the claim


def queued(tenant: str) -> QueuedJob:
    return QueuedJob("new", Priority.INTERACTIVE, tenant, 1.0, CARD.digest, 1, 4, 0.0, 900.0)


def names(placed: list[tuple[Key, str]]) -> list[str]:
    return [key[0] for key, _ in placed]


def test_an_instance_gets_what_it_can_begin_and_the_others_wait_here() -> None:
    made = placement(prepost("p1"))
    keys = [join(made, f"j{i}", stage(HEAVY)) for i in range(10)]
    placed, _ = made.place(0.0)
    assert placed == [(keys[0], "p1"), (keys[1], "p1")]
    assert made.place(1.0)[0] == []
    made.leave(keys[0], 2.0)
    assert names(made.place(2.0)[0]) == ["j2"]


def test_one_stage_is_on_its_way_where_those_before_it_are_short() -> None:
    made = placement(prepost("p1"))
    for i in range(10):
        join(made, f"j{i}", stage(LIGHT))
    assert names(made.place(0.0)[0]) == ["j0", "j1", "j2"]


def test_a_models_thread_gets_the_next_stage_just_before_it_is_free() -> None:
    made = placement(prepost("p1", processes=8))
    for i in range(3):
        join(made, f"j{i}", stage(StageCost(100.0, 2000.0), "finish"))
    placed, wake_at = made.place(0.0)
    assert names(placed) == ["j0"]
    assert wake_at is not None
    assert abs(wake_at - (2.0 - AHEAD_MS / 1e3)) < 1e-9
    assert names(made.place(wake_at)[0]) == ["j1"], "though the first one is still pasted"


def test_encodings_do_not_wait_for_pictures_that_are_pasted() -> None:
    made = placement(prepost("p1", processes=2))
    for i in range(2):
        join(made, f"f{i}", stage(StageCost(5000.0, 50.0), "finish"))
    made.place(0.0)
    join(made, "e", stage(StageCost(model_ms=50.0), "encode"))
    assert names(made.place(0.2)[0]) == ["e"]


def test_another_tenants_stage_is_the_next_one_however_many_heavy_ones_wait() -> None:
    made = placement(prepost("p1", processes=2))
    heavy = [join(made, f"h{i}", stage(HEAVY), "many") for i in range(44)]
    made.place(0.0)
    for turn in range(3):  # it asks for one stage after the other
        own = join(made, f"edit{turn}", stage(LIGHT), "one")
        made.leave(heavy[turn], 5.0 * (turn + 1))
        assert names(made.place(5.0 * (turn + 1))[0])[:1] == [f"edit{turn}"]
        made.leave(own, 5.0 * (turn + 1) + 0.01)
        made.place(5.0 * (turn + 1) + 0.01)


def test_long_work_leaves_a_process_free_while_jobs_of_another_tenant_go_on() -> None:
    made = placement(prepost("p1", processes=2))
    made.costs.observe("inspect", CARD.digest, "one", 1.0, LIGHT)
    for tenant in ("many", "one"):
        made.begin_job(tenant)
    heavy = [join(made, f"h{i}", stage(HEAVY), "many") for i in range(3)]
    assert names(made.place(0.0)[0]) == ["h0"]
    light = join(made, "edit", stage(LIGHT), "one")
    assert names(made.place(1.0)[0]) == ["edit"], "it waits for none of them"
    made.leave(light, 1.1)
    assert names(made.place(1.1)[0]) == [], "its next stage may come"
    made.end_job("one", 1.2)
    assert made.place(1.2) == ([], 1.2 + RECENT_S), "its next job may come"
    assert names(made.place(1.2 + RECENT_S)[0]) == ["h1"], "what is idle is used"
    made.leave(heavy[0], 40.0)
    assert names(made.place(40.0)[0]) == ["h2"]


def test_two_tenants_of_long_work_use_all_processes() -> None:
    made = placement(prepost("p1", processes=2))
    for tenant in ("a", "b"):
        made.costs.observe("inspect", CARD.digest, tenant, 1.0, HEAVY)
        made.begin_job(tenant)
        join(made, tenant, stage(HEAVY), tenant)
    assert names(made.place(0.0)[0]) == ["a", "b"]


def test_batch_jobs_come_after_interactive_ones() -> None:
    made = placement(prepost("p1", processes=1))
    first = join(made, "first", stage(HEAVY))
    made.place(0.0)
    join(made, "batch", stage(LIGHT), priority=Priority.BATCH)
    join(made, "person", stage(LIGHT))
    made.leave(first, 1.0)
    assert names(made.place(1.0)[0])[0] == "person"


def test_silent_and_draining_instances_are_asked_nothing() -> None:
    fleet = Fleet()
    made = StagePlacement(fleet)
    observe(made, fleet, prepost("p1"))
    observe(made, fleet, prepost("p2", draining=True))
    fleet.expire(SILENCE_S + 1)
    observe(made, fleet, prepost("p2", draining=True), 3.0)
    key = join(made, "j", stage())
    assert made.place(4.0)[0] == [], "none is left, and the stage waits"
    observe(made, fleet, prepost("p3"), 100.0)
    assert made.place(100.0)[0] == [(key, "p3")]


def test_an_instance_that_failed_is_asked_again_only_where_there_is_no_other() -> None:
    made = placement(prepost("p1"), prepost("p2"))
    key = join(made, "j", stage(avoid=frozenset({"p1"})))
    assert made.place(0.0)[0] == [(key, "p2")]
    again = join(made, "k", stage(avoid=frozenset({"p1", "p2"})))
    assert made.place(0.0)[0] == [(again, "p1")]


def test_a_stage_that_is_given_up_leaves_its_room_and_its_place() -> None:
    made = placement(prepost("p1", processes=1))
    runs, waits, last = (join(made, name, stage(HEAVY)) for name in ("runs", "waits", "last"))
    made.place(0.0)
    made.leave(waits, 1.0)
    assert "waits" not in made
    made.leave(runs, 1.0)
    assert made.place(1.0)[0] == [(last, "p1")]
    made.leave(last, 2.0)
    assert made.wait_ms(CARD.digest) == 0.0


def test_costs_are_a_tenants_own_once_they_are_known() -> None:
    costs = StageCosts()
    first = costs.of("inspect", "m", "a")
    for _ in range(50):
        costs.observe("inspect", "m", "light", 1.0, StageCost(images_ms=10.0))
        costs.observe("inspect", "m", "heavy", 1.0, StageCost(images_ms=4000.0))
    assert first.images_ms > 0 == first.model_ms
    assert round(costs.of("inspect", "m", "light").images_ms) == 10
    assert round(costs.of("inspect", "m", "heavy").images_ms) == 4000
    assert 10 < costs.of("inspect", "m", "new").images_ms < 4000
    costs.observe("finish", "m", "heavy", 40.0, StageCost(2000.0, 20.0))
    assert costs.of("finish", "m", "heavy", 20.0) == (1000.0, 10.0), "a picture of half the size"


def test_what_waits_is_part_of_the_wait_and_another_tenants_heap_is_not() -> None:
    made = placement(prepost("p1", processes=2))
    for i in range(20):
        join(made, f"h{i}", stage(HEAVY), "many")
    made.place(0.0)
    assert made.wait_ms(CARD.digest) == 20 * 5000 / 2
    assert made.wait_ms(OTHER.digest) == 0.0, "nobody serves it"
    join(made, "o", stage(HEAVY, card=OTHER), "many")
    assert made.wait_ms(CARD.digest) == 20 * 5000 / 2, "another model's stage waits for other instances"
    person = queued("one")
    assert made.wait_ms(CARD.digest, person) < 20_000 < made.wait_ms(CARD.digest, queued("many"))


ASKED = st.tuples(
    st.sampled_from([CARD, OTHER]),
    st.sampled_from(["a", "b", "c"]),
    st.floats(1.0, 5000.0),
    st.sampled_from(["inspect", "encode", "finish"]),
    st.booleans(),
)


@given(
    fleet=st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from([CARD, OTHER]), st.booleans()), min_size=1, max_size=4
    ),
    asked=st.lists(ASKED, min_size=1, max_size=40),
)
def test_every_stage_is_placed_once_where_it_can_run_and_none_waits_beside_free_room(
    fleet: list[tuple[int, ModelCard, bool]], asked: list[tuple[ModelCard, str, float, Verb, bool]]
) -> None:
    states = {
        f"p{i}": prepost(f"p{i}", processes=count, card=card, draining=draining)
        for i, (count, card, draining) in enumerate(fleet)
    }
    made = placement(*states.values())
    waiting: dict[Key, PrepostStage] = {}
    running: dict[Key, tuple[str, PrepostStage]] = {}
    done, now = Counter[Key](), 0.0
    for card, tenant, ms, verb, ends in asked:
        now += 0.05
        uses = {
            "inspect": StageCost(ms, 0.0),
            "encode": StageCost(0.0, ms),
            "finish": StageCost(ms, ms),
        }
        one = stage(uses[verb], verb, card)
        waiting[join(made, f"j{len(waiting) + len(done)}", one, tenant)] = one
        if ends and running:
            key = next(iter(running))
            del running[key]
            made.leave(key, now)
        for key, name in made.place(now)[0]:
            given = waiting.pop(key)
            assert states[name].models[0].digest == given.digest
            assert not states[name].draining
            running[key] = name, given
            done[key] += 1
        assert made.place(now)[0] == []
        for name, state in states.items():
            here = [given for at, given in running.values() if at == name]
            images = [given.cost.images_ms for given in here if given.cost.images_ms]
            processes = fleet[int(name[1:])][0]
            assert len(images) <= processes + 1
            if len(images) < processes and not state.draining:  # an inspection could begin here
                assert not any(
                    s.digest == state.models[0].digest and s.verb == "inspect" for s in waiting.values()
                )
    assert set(done.values()) <= {1}


@given(
    costs=st.lists(st.floats(10.0, 5000.0), min_size=2, max_size=3),
    processes=st.integers(1, 2),
)
def test_tenants_that_always_wait_get_equal_work(costs: list[float], processes: int) -> None:
    made, now = placement(prepost("p1", processes=processes)), 0.0
    served = Counter[str]()
    for turn in range(20):
        for index, ms in enumerate(costs):
            join(made, f"{index}-{turn}", stage(StageCost(images_ms=ms)), str(index))
    running = made.place(now)[0]
    for _ in range(16):
        key, _ = running.pop(0)
        served[key[0].split("-")[0]] += 1
        now += 1.0
        made.leave(key, now)
        running += made.place(now)[0]
    work = [served[str(index)] * ms for index, ms in enumerate(costs) if served[str(index)] < 20]
    assert max(work) - min(work) <= 4 * max(costs)


def test_work_that_ended_long_ago_does_not_count() -> None:
    made = placement(prepost("p1"), prepost("p2"))
    encoding = stage(StageCost(model_ms=500.0), "encode")
    first = join(made, "a", encoding)
    assert made.place(0.0)[0] == [(first, "p1")]
    made.leave(first, 0.4)
    later = join(made, "b", encoding)
    assert made.place(100.0)[0] == [(later, "p1")]


def telling(*answering: str, instance: str = "p1") -> ServiceState:
    return state_of(ServiceName.PREPOST, instance, answering=answering)


@asynccontextmanager
async def asking(questions: PrepostRequests, name: str) -> AsyncIterator[asyncio.Task[None]]:
    """Somebody who waits for an answer; looked at before and after, and left when the test is over."""

    async def wait() -> None:
        async with questions.asked(name):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_question_that_nobody_has_is_lost_after_a_while() -> None:
    questions = PrepostRequests()
    before = time.monotonic()
    async with asking(questions, "inspect a") as task:
        now = time.monotonic()
        questions.observe(telling("inspect b"), now + 1)
        questions.look(before + SILENCE_S - 0.1)
        await settled()
        assert not task.done()
        questions.look(now + SILENCE_S + 0.1)
        with pytest.raises(DeadlineExceeded, match="lost"):
            await task


async def test_a_question_that_somebody_has_is_waited_for_however_long() -> None:
    questions = PrepostRequests()
    async with asking(questions, "inspect a") as task:
        now = time.monotonic()
        for second in range(1, 60):
            questions.observe(telling("inspect a"), now + second)
            questions.observe(telling(instance="p2"), now + second)
            questions.look(now + second)
        questions.look(now + 59 + SILENCE_S - 0.1)  # its owner has said nothing since
        await settled()
        assert not task.done()
        questions.look(now + 59 + SILENCE_S + 0.1)
        with pytest.raises(DeadlineExceeded):
            await task


async def test_nothing_is_lost_while_one_cannot_know() -> None:
    questions = PrepostRequests(lambda: False)
    async with asking(questions, "inspect a") as task:
        now = time.monotonic()
        for later_s in (100, 100 + SILENCE_S - 0.1):
            questions.look(now + later_s)
            await settled()
            assert not task.done()
