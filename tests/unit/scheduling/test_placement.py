"""Choosing a worker: telemetry, what it does not show yet, who fell silent, and how few are looked at."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.fleet import SILENCE_S
from giornata.planning.operations import StepCosts
from giornata.scheduling.adapters import NeededLora
from giornata.scheduling.demand import LEAST, JobDemand, RowLoad, RowShape, StepTimeModel, WorkerLoad
from giornata.scheduling.placement import SLACK, ModelSlack, Placement, StallTimeout, slack_while
from giornata.scheduling.policies import Policy, finish_time
from giornata.scheduling.scheduler import LOOKED_AT
from giornata.scheduling.worker_state import FEWER, WorkerIndex, WorkerOccupancy, WorkerTotals
from giornata.wire.workers import (
    LoadSample,
    RowProgress,
    ServiceName,
    ServiceState,
    TemplateCounters,
    Tier,
    WorkerState,
)
from giornata_lab.bench.systems.networks import PLAIN_4, plain
from giornata_lab.simulation.baselines import request_level
from tests.fakes.fleet import CARD, state_of, worker_costs
from tests.present import present

SHAPE = RowShape(text=0, image=16, computed=16, steps=10)
DEMAND = JobDemand(CARD.name, CARD.digest, (SHAPE,))


def worker(name: str, *rows: RowProgress, capacity: int = 4, **fields: object) -> ServiceState:
    shown = WorkerState(capacity_rows=capacity, capacity_tokens=1000, running=rows)
    state = state_of(ServiceName.DENOISER, name, models=(CARD,), worker=shown)
    return state.model_copy(update=fields)


def telling(state: ServiceState, **fields: object) -> ServiceState:
    """The same, of a worker that tells these fields, too."""
    return state.model_copy(update={"worker": present(state.worker).model_copy(update=fields)})


def row(job: str, step: int, steps: int, attempt: int = 1) -> RowProgress:
    return RowProgress(job_id=job, attempt=attempt, index=0, step=step, steps=steps, tokens=16)


def placement(*states: ServiceState) -> Placement:
    made = Placement()
    for state in states:
        made.observe(state, 0)
    return made


def choose(known: Placement, demand: JobDemand, policy: Policy = finish_time) -> str | None:
    chosen = policy(known.candidates(demand, LOOKED_AT), demand)
    return chosen.instance if chosen else None


def test_the_worker_that_is_done_soonest_is_chosen_not_the_one_with_request_level() -> None:
    known = placement(worker("long", row("a", 0, 50)), worker("short", row("b", 9, 10), row("c", 8, 10)))
    assert choose(known, DEMAND) == "short"
    assert choose(known, DEMAND, request_level) == "long"


def test_a_burst_between_two_telemetry_messages_is_spread() -> None:
    fleet = placement(worker("d1"), worker("d2"), worker("d3"))
    chosen = []
    for i in range(6):
        name = present(choose(fleet, DEMAND))
        fleet.assign(f"j{i}", 1, name, DEMAND, now=0)
        chosen.append(name)
    assert sorted(chosen) == ["d1", "d1", "d2", "d2", "d3", "d3"]


def test_an_assignment_counts_once_when_telemetry_shows_it() -> None:
    fleet = placement(worker("d1"), worker("d2", row("x", 0, 11), row("y", 9, 10)))
    fleet.assign("j", 1, "d1", DEMAND, now=0)
    fleet.observe(worker("d1", row("j", 0, 10)), 1)
    assert choose(fleet, DEMAND) == "d1", "10 steps on d1, not 20"


@pytest.mark.parametrize(
    ("told", "steps"),
    [
        ({"encoded": False}, 10),
        ({"encoded": True}, 2),
        ({}, 10),  # of a version that tells of no inputs while there are no text tokens
        ({"text_tokens": 5}, 2),
    ],
)
def test_a_row_counts_as_it_was_asked_for_until_its_inputs_are_there(
    told: dict[str, object], steps: int
) -> None:
    fleet = placement(worker("d1"))
    fleet.assign("j", 1, "d1", DEMAND, now=0)
    fleet.observe(worker("d1", row("j", 0, 2).model_copy(update=told)), 1)
    [candidate] = fleet.candidates(DEMAND, LOOKED_AT)
    assert [load.steps for load in candidate.outlook.backlog.running] == [steps]


def test_companions_cost_a_step_in_full_and_no_other() -> None:
    whole, twin, masked = (
        row("j", 0, 10).model_copy(update={"encoded": True, "begun": True, **fields})
        for fields in (
            {"companion_tokens": 16},
            {"tokens": 32},
            {"companion_tokens": 16, "computed_tokens": 4},
        )
    )
    costs = []
    for told in (whole, twin, masked):
        [candidate] = placement(worker("d1", told)).candidates(DEMAND, LOOKED_AT)
        costs.append([load.step_ms for load in candidate.outlook.backlog.running])
    assert costs == [[32], [32], [4]]


def test_no_worker_of_the_model_or_with_room_is_none() -> None:
    other = CARD.model_copy(update={"digest": "other"})
    assert choose(placement(worker("d1", models=(other,))), DEMAND) is None
    assert choose(placement(worker("d1", row("a", 0, 9), capacity=1)), DEMAND) is None
    assert choose(placement(worker("d1", draining=True)), DEMAND) is None
    assert placement(worker("d1")).candidates(DEMAND, LOOKED_AT, excluded={"d1"}) == []


def test_a_job_larger_than_every_worker_goes_to_an_empty_one() -> None:
    large = JobDemand(CARD.name, CARD.digest, (SHAPE,) * 9)
    assert choose(placement(worker("busy", row("a", 0, 9)), worker("empty")), large) == "empty"


def test_silence_and_forgetting_are_noticed() -> None:
    fleet = placement(worker("d1"), worker("d2"))
    fleet.assign("a", 1, "d1", DEMAND, now=0)
    fleet.assign("b", 1, "d2", DEMAND, now=0)
    fleet.observe(worker("d2"), SILENCE_S)
    assert [lost.key[0] for lost in fleet.expire(SILENCE_S + 0.1)] == ["a"]
    fleet.observe(worker("d2"), SILENCE_S + 0.1)
    assert [doubt.key[0] for doubt in fleet.unlisted()] == ["b"]
    fleet.observe(worker("d2", row("b", 1, 9)), SILENCE_S + 0.2)
    assert fleet.unlisted() == []


def test_rows_of_a_worker_that_fell_silent_are_not_doubted_but_lost() -> None:
    fleet = placement(worker("d1"))
    fleet.assign("a", 1, "d1", DEMAND, now=0)
    fleet.observe(worker("d1"), 0.1)
    late = SILENCE_S + 0.05
    assert fleet.expire(late) == fleet.unlisted() == [], "all that is known is that the worker is silent"
    assert [lost.key[0] for lost in fleet.expire(late + 0.1)] == ["a"]


def test_rows_of_a_worker_that_was_not_heard_yet_are_waited_for() -> None:
    """A router that has just started adopts rows before it has heard of their workers."""
    fleet = placement()
    fleet.assign("a", 1, "d1", DEMAND, now=0)
    assert fleet.expire(SILENCE_S) == []
    assert [lost.key[0] for lost in fleet.expire(SILENCE_S + 0.1)] == ["a"]
    fleet.assign("b", 1, "d2", DEMAND, now=0)
    fleet.observe(worker("d2"), SILENCE_S)
    assert [lost.key[0] for lost in fleet.expire(SILENCE_S + 0.1)] == ["a"]


def test_an_older_attempt_does_not_vouch_for_a_newer_one() -> None:
    fleet = placement(worker("d1"))
    fleet.assign("a", 2, "d1", DEMAND, now=0)
    fleet.observe(worker("d1", row("a", 1, 9, attempt=1)), SILENCE_S + 1)
    assert [doubt.key[1] for doubt in fleet.unlisted()] == [2]


def test_a_worker_whose_step_does_not_end_gets_nothing_until_it_does() -> None:
    fleet = Placement(patience=StallTimeout(factor=10.0, least_ms=1000.0))
    fleet.observe(worker("d1", row("j", 0, 10)), 0)
    fleet.assign("j", 1, "d1", DEMAND, now=0)
    assert fleet.stalled() == []
    fleet.observe(stepping("d1", 900.0), 1)
    assert fleet.stalled() == [], "shorter than the least patience"
    fleet.observe(stepping("d1", 1100.0), 2)
    assert [a.key[0] for a in fleet.stalled()] == ["j"]
    assert choose(fleet, DEMAND) is None
    fleet.observe(stepping("d1", 5.0), 3)
    assert fleet.stalled() == []
    assert choose(fleet, DEMAND) == "d1"


def test_patience_grows_with_what_a_step_was_predicted_to_take() -> None:
    fleet = Placement(patience=StallTimeout(factor=100.0, least_ms=1000.0))
    fleet.observe(stepping("d1", 1100.0), 0)  # 16 ms predicted
    fleet.assign("j", 1, "d1", DEMAND, now=0)
    assert fleet.stalled() == []
    fleet.observe(stepping("d1", 1700.0), 1)
    assert [a.key[0] for a in fleet.stalled()] == ["j"]


def test_a_job_that_the_message_lists_first_counts_once_in_what_a_step_was_predicted_to_take() -> None:
    fleet = Placement(patience=StallTimeout(factor=50.0, least_ms=1000.0))
    fleet.observe(worker("d1"), 0)
    fleet.assign("j", 1, "d1", DEMAND, now=0)
    fleet.observe(stepping("d1", 1100.0), 1)  # 16 ms predicted for one row, 32 for two
    assert [a.key[0] for a in fleet.stalled()] == ["j"]
    fleet.observe(stepping("d1", 700.0), 2)
    assert fleet.finish_ms("j") == pytest.approx(160.0), "10 steps of one row"


def test_what_was_reported_counts_no_more_though_telemetry_lists_it_still() -> None:
    fleet = placement(worker("d1", row("j", 9, 10), capacity=1))
    fleet.assign("j", 1, "d1", DEMAND, now=0)
    assert choose(fleet, DEMAND) is None
    fleet.release("j", 1)
    assert choose(fleet, DEMAND) == "d1"
    fleet.observe(worker("d1", row("j", 9, 10), capacity=1), 1)
    assert choose(fleet, DEMAND) == "d1", "the same message, sent twice"
    fleet.observe(worker("d1", row("k", 0, 10), capacity=1), 2)
    assert choose(fleet, DEMAND) is None


def stepping(name: str, ms: float) -> ServiceState:
    return telling(worker(name, row("j", 0, 10)), stepping_ms=ms)


def test_a_worker_keeps_the_templates_that_it_told_last() -> None:
    fleet, asked = Placement(), replace(DEMAND, template="t")

    def tell(**fields: object) -> list[Tier | None]:
        fleet.observe(telling(worker("d1"), **fields), 0)
        return [candidate.template for candidate in fleet.candidates(asked, LOOKED_AT)]

    assert tell(resident={Tier.DISK: ("t", "u")}) == [Tier.DISK]
    assert tell(resident=None) == [Tier.DISK]
    assert tell(resident={Tier.MEMORY: ("t",), Tier.DISK: ("t",)}) == [Tier.MEMORY]
    assert tell(resident=None) == [Tier.MEMORY]
    assert tell(resident={}) == [None]


def test_telemetry_says_whether_rows_that_wait_may_go_to_its_worker() -> None:
    fleet = Placement()
    assert fleet.observe(worker("d1", row("a", 1, 9), capacity=2), 0)
    assert not fleet.observe(worker("d1", row("a", 1, 9), row("b", 1, 9), capacity=2), 0)
    fleet.release("b", 1)
    assert not fleet.observe(worker("d2", capacity=2, draining=True), 0)
    fleet.assign("c", 1, "d3", DEMAND, 0)
    assert fleet.observe(worker("d3", capacity=1), 0), "nothing was known of it when the row was assigned"
    fleet.assign("e", 1, "d3", DEMAND, 0)
    assert not fleet.observe(worker("d3", capacity=1), 0), "an assignment counts that is not listed yet"


def test_reading_a_template_from_disk_takes_what_reads_have_taken() -> None:
    fleet = Placement()
    for name, tier in (("d1", Tier.DISK), ("d2", Tier.MEMORY)):
        state = telling(
            worker(name),
            blocks=plain(1),
            cost_model=worker_costs(0.0, 0.0, 1.0),
            loads=(LoadSample(tier=Tier.DISK, size_bytes=1000, load_ms=5.0),),
            resident={tier: ("t", "u")},
            templates=TemplateCounters(disk_bytes=4000),
        )
        fleet.observe(state, 0)
    asked = replace(DEMAND, template="t")
    assert {c.instance: (c.template, c.fetch_ms) for c in fleet.candidates(asked, LOOKED_AT)} == {
        "d1": (Tier.DISK, pytest.approx(10.0)),
        "d2": (Tier.MEMORY, 0.0),
    }
    found = fleet.candidates(asked, LOOKED_AT, fetching="d1")
    assert {c.instance: c.fetch_ms for c in found} == {"d1": 0.0, "d2": 0.0}, "it is being read there"


def test_token_level_balancing_counts_masked_tokens() -> None:
    whole, masked = row("a", 0, 10), row("b", 0, 10).model_copy(update={"computed_tokens": 2})
    known = placement(worker("whole", whole), worker("masked", masked))
    known.assign("c", 1, "masked", replace(DEMAND, shapes=(replace(SHAPE, computed=3),)), now=0)
    found = {c.instance: c.tokens for c in known.candidates(DEMAND, LOOKED_AT)}
    assert found == {"whole": 16, "masked": 5}


@pytest.mark.parametrize(
    ("slack", "waiting", "rows"),
    [
        (0.05, 0, 3),
        (0.0, 0, 8),
        (0.2, 0, 2),
        (0.2, 2, 2),
        (0.2, 3, 5),
        (0.2, 4, 7),
        (0.2, 80, 8),
        (0.0, 80, 8),
    ],
)
def test_a_worker_gets_no_more_rows_than_make_it_faster_and_more_where_many_wait(
    slack: float, waiting: int, rows: int
) -> None:
    assert rows_of_one_worker(Placement(slack=slack), waiting) == rows


@given(st.integers(0, 40), st.integers(0, 40))
def test_a_longer_line_never_leaves_a_worker_fewer_rows(waiting: int, more: int) -> None:
    fewer, rows = (rows_of_one_worker(Placement(slack=0.2), count) for count in (waiting, waiting + more))
    assert 2 <= fewer <= rows <= 8


@pytest.mark.parametrize("before", ["gone", "d"])
def test_workers_that_are_gone_make_no_waiting_row_count_less(before: str) -> None:
    """One that fell silent, and one that has told of itself before."""
    known = Placement(slack=0.2)
    known.observe(worker(before, capacity=8), 0)
    known.observe(worker("d", capacity=8), SILENCE_S + 1)
    known.expire(SILENCE_S + 1)
    assert rows_of_one_worker(known, waiting=3) == rows_of_one_worker(Placement(slack=0.2), waiting=3) == 5


def rows_of_one_worker(known: Placement, waiting: int) -> int:
    """How many rows the worker d of 8 places gets, while so many wait and it is the only one."""
    now, costs = SILENCE_S + 1, worker_costs(1.0, 0.0, 5 / 16)
    known.observe(telling(worker("d", capacity=8), blocks=plain(1), cost_model=costs), now)
    known.assign("before", 1, "d", DEMAND, now=now)
    model, other = (DEMAND.model, DEMAND.model_digest), ("another", "model")
    known.heed({model: waiting, other: 1000})
    given_rows = 1
    while known.has_room(DEMAND) and choose(known, DEMAND) == "d":
        known.assign(f"j{given_rows}", 1, "d", DEMAND, now=now)
        given_rows += 1
    assert choose(known, DEMAND) is None
    return given_rows


def test_only_rows_of_its_own_models_let_a_worker_take_more() -> None:
    """Half of the slack where one more waits for each worker; that of the longest line where it has two."""
    one, other = ("one", "digest"), ("other", "digest")
    slacks = ModelSlack(0.1)
    slacks.count([one], 10)
    slacks.count([one, other], 10)
    assert slacks.heed({one: 21, other: 8}) == {one, other}
    of_one, of_other = slack_while(21, 20, 0.1), slack_while(8, 10, 0.1)
    assert of_one == pytest.approx(0.05 / 2.05)
    found = [slacks.of(models) for models in ([one], [other], [other, one], [])]
    assert found == [of_one, of_other, of_one, 0.1]
    assert slacks.heed({one: 21, other: 80}) == {other}
    assert slacks.of([one]) == of_one
    assert slacks.heed({one: 22, other: 80}) == set(), "about as many"
    slacks.count([one, other], -10)
    assert slacks.heed({one: 21}) == {one, other}
    assert slacks.of([one]) == slack_while(21, 10, 0.1)
    assert slacks.of([other]) == 0.1, "without workers, as if there were one"
    slacks.count([one], -10)
    slacks.heed({one: 4})
    assert slacks.of([one]) == slack_while(4, 1, 0.1)


def test_a_fleet_of_which_no_row_has_waited_yet_gives_up_half_of_what_a_lone_worker_does() -> None:
    alone, fleet = ("alone", "digest"), ("fleet", "digest")
    slacks = ModelSlack(0.1)
    slacks.count([alone, fleet], 1)
    slacks.count([fleet], 9)
    assert [slacks.of(models) for models in ([alone], [fleet], [alone, fleet])] == [0.1, 0.05, 0.05]
    assert slacks.heed({alone: 1, fleet: 1}) == set(), "about as much"
    assert slacks.heed({fleet: 10}) == {fleet}
    assert slacks.of([fleet]) == slack_while(10, 10, 0.1)


@given(waiting=st.integers(0, 100), more=st.integers(0, 100), workers=st.integers(1, 100))
def test_the_more_rows_wait_the_less_is_given_up_for_those_that_run(
    waiting: int, more: int, workers: int
) -> None:
    slack, less = slack_while(waiting, workers), slack_while(waiting + more, workers)
    assert 0 < less <= slack <= slack_while(0, workers) <= slack_while(0, 1) == SLACK
    here = WorkerLoad(8, 20.0, (RowLoad(steps=30, step_ms=45.0),))
    assert LEAST <= here.worth(slack) <= here.worth(less) <= here.places
    assert here.worth(slack_while(100 * workers, workers)) == here.places, (
        "nobody waits beside a free place for long"
    )


# Few workers are looked at, and they are the same that a look at all of them would find.


PACE = StepTimeModel()
CAPACITY = 4
KEPT = 2 * FEWER
"""Workers that are looked at."""

moves = st.lists(
    st.tuples(
        st.integers(0, 25),
        st.sampled_from(["put", "drop", "give", "take"]),
        st.integers(0, CAPACITY),
        st.sets(st.sampled_from("tuv")),
        st.sets(st.sampled_from("lmn")),
    ),
    max_size=60,
)


def occupied(number: int, rows: int, templates: set[str], loras: Iterable[str] = ()) -> WorkerOccupancy:
    state = worker(
        f"d{number}",
        *[row(f"j{number}-{i}", 0, 1 + (number + i) % 5) for i in range(rows)],
        capacity=CAPACITY,
    )
    shown = present(state.worker).model_copy(
        update={
            "resident": {Tier.MEMORY: tuple(sorted(templates))},
            "adapters_resident": {
                Tier.DISK: tuple(sorted(loras)),
                Tier.DEVICE: tuple(sorted(loras)) if number % 3 == 0 else (),
            },
        }
    )
    return WorkerOccupancy.of(state, shown, PACE, None)


def held(one: WorkerOccupancy) -> WorkerTotals:
    return one.sum_up(PACE, {})


@pytest.mark.parametrize(
    ("told", "shape", "reuses"),
    [
        ({"computed_tokens": 4, "padding_tokens": 6}, RowShape(9, 16, 4, 10, padding=6), True),
        (
            {"computed_tokens": 4, "padding_tokens": 6, "renewed_every": 3},
            RowShape(9, 16, 4, 10, padding=6),
            False,
        ),
        ({"prefix_tokens": 30}, RowShape(9, 16, 16, 10, prefix=30), False),
        (
            {"low_rank": 7.0, "control": 11.0},
            RowShape(9, 16, 16, 10, low_rank=7.0, segments=1.0, control=11.0),
            False,
        ),
    ],
    ids=["padding", "padding, renewed", "prefix", "adapters"],
)
def test_a_row_weighs_as_one_of_a_demand(told: dict[str, float], shape: RowShape, reuses: bool) -> None:
    costs = StepCosts((5.0, 0.1, 0.2, 0.001, 0.0, 0.0, 0.3, 2.0, 0.4))
    pace = StepTimeModel(costs, PLAIN_4, keeps_padding=True)
    state = worker("d", row("j", 0, 10).model_copy(update={"text_tokens": 9} | told))
    weighed = WorkerOccupancy.of(state, present(state.worker), pace, None).sum_up(pace, {}).work_ms
    every = int(told.get("renewed_every", 0))
    assert weighed == pytest.approx(shape.load(pace, reuses=reuses, renewed_every=every).work_ms)


def holding(
    ordered: Sequence[WorkerOccupancy], workers: Collection[WorkerOccupancy], first: str, second: str
) -> list[str]:
    """With the first LoRA on the device, of these the ones with the second, too, or else those; then in any tier."""
    found = list[str]()
    for tiers in ({Tier.DEVICE}, set(Tier)):
        with_first = [one for one in workers if one.loras.get(first) in tiers]
        both = [one for one in with_first or workers if one.loras.get(second) in tiers]
        found += [one.name for one in ordered if one in (both or with_first)][: KEPT // FEWER]
    return found


@given(moves=moves, excluded=st.sets(st.integers(0, 25).map(lambda number: f"d{number}")))
def test_those_with_least_to_compute_among_all_and_among_holders(
    moves: list[tuple[int, str, int, set[str], set[str]]], excluded: set[str]
) -> None:
    roster, members = WorkerIndex(held), dict[str, WorkerOccupancy]()
    for number, move, rows, templates, loras in moves:
        name = f"d{number}"
        if move == "put":
            members[name] = occupied(number, rows, templates, loras)
            roster.put(members[name])
        elif move == "drop":
            members.pop(name, None)
            roster.drop(name)
        elif name in members:
            key = (f"x{rows}", 1)
            if move == "give":
                members[name].give(key, DEMAND, 0.0)
            else:
                members[name].take(key)
            roster.changed(name)
        others = (each for each in members.values() if each.name not in excluded)
        assert roster.has_room(DEMAND, excluded) is any(
            DEMAND.fits(held(each).rows, CAPACITY) for each in others
        )
        roster.least(1, excluded)
    able = [one for name, one in members.items() if name not in excluded]
    ordered = sorted(able, key=lambda one: (held(one).work_ms, one.name))
    assert [one.name for one in roster.all(excluded)] == [one.name for one in ordered]
    for template in (None, *"tuvw"):
        having = [one.name for one in ordered if template in one.places][:KEPT]
        near = [one.name for one in ordered][:KEPT]
        found = [one.name for one in roster.fitting(replace(DEMAND, template=template), KEPT, excluded)]
        assert found == list(dict.fromkeys(near + having))
    for first, second in (("l", "m"), ("m", "n"), ("l", "z"), ("z", "n")):
        asked = replace(DEMAND, adapters=(NeededLora(second, 1), NeededLora(first, 2)))
        having = holding(ordered, members.values(), first, second)
        found = [one.name for one in roster.fitting(asked, KEPT, excluded)]
        assert found == list(dict.fromkeys(near + having))
    everyone = sorted(members.values(), key=lambda one: (held(one).work_ms, one.name))
    for count in (1, 3, 100):
        sampled = roster.sample(count)
        places = [everyone.index(one) for one, _ in sampled]
        assert places == sorted(places)
        assert sum(number for _, number in sampled) == pytest.approx(len(everyone))
        assert len(sampled) >= min(count, len(everyone))
    for demand in (DEMAND, replace(DEMAND, shapes=(SHAPE,) * 3), replace(DEMAND, alone=True)):
        assert roster.has_room(demand, excluded) is any(demand.fits(held(o).rows, CAPACITY) for o in able)


def test_a_sample_stands_in_the_middle_of_those_that_it_stands_for() -> None:
    roster = WorkerIndex(held)
    for number in range(15):
        roster.put(occupied(number, 0, set()))
    ordered = roster.least(15)
    assert roster.sample(3) == [(ordered[place], 5.0) for place in (2, 7, 12)]


def test_a_forecast_sums_up_the_workers_that_it_looks_at_and_no_others() -> None:
    summed: list[str] = []

    def noted(one: WorkerOccupancy) -> WorkerTotals:
        summed.append(one.name)
        return held(one)

    roster = WorkerIndex(noted)
    for turn in range(2):
        for number in range(40):
            roster.put(occupied(number, (number + turn) % 5, set()))
        if not turn:
            roster.least(1)
            summed.clear()
    looked_at = [one for one, _ in roster.sample(8)]
    assert sorted(summed) == sorted(one.name for one in looked_at)
    assert len(looked_at) == 8
    assert all(one.totals is not None and one.totals.rows == held(one).rows for one in looked_at)
    assert roster.least(40)[0].name in {f"d{number}" for number in range(40) if not (number + 1) % 5}
